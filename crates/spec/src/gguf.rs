//! GGUF's NVFP4 blocks: 64 elements in 36 bytes, 4 scale bytes then 32 bytes of codes. In each
//! 16-element sub-block the low nibbles hold elements 0…7 and the high nibbles elements 8…15.
//! Source: llama.cpp's `block_nvfp4`.

use crate::{BLOCK, Error, Result, area, check_len, e2m1, e4m3};

/// Elements of a GGUF block.
pub const BLOCK_ELEMENTS: usize = 64;

/// Bytes of a GGUF block.
pub const BLOCK_BYTES: usize = 36;

const SCALES: usize = BLOCK_ELEMENTS / BLOCK;

/// Number of GGUF blocks of a `rows` × `cols` matrix.
fn blocks(rows: usize, cols: usize) -> Result<usize> {
    if !cols.is_multiple_of(BLOCK_ELEMENTS) {
        return Err(Error::Multiple { what: "columns of a GGUF matrix", of: BLOCK_ELEMENTS, got: cols });
    }
    Ok(area(rows, cols)? / BLOCK_ELEMENTS)
}

/// Bytes of a packed matrix.
pub fn packed_len(rows: usize, cols: usize) -> Result<usize> {
    area(blocks(rows, cols)?, BLOCK_BYTES)
}

/// Checks that codes and scales have the lengths of a `rows` × `cols` matrix, and that GGUF can
/// hold the scales.
pub fn check(codes: &[u8], scales: &[u8], rows: usize, cols: usize) -> Result<()> {
    let blocks = blocks(rows, cols)?;
    check_len("codes", blocks * BLOCK_ELEMENTS / 2, codes.len())?;
    check_len("scales", blocks * SCALES, scales.len())?;
    match scales.iter().position(|&s| s >= e4m3::NAN_BYTE) {
        Some(index) => Err(Error::ScaleByte { index, byte: scales[index] }),
        None => Ok(()),
    }
}

/// Packs codes and scales into GGUF blocks. The same numbers in another order: the block scales
/// must be finite and non-negative, because GGUF reads a NaN as 0 and has no sign.
pub fn pack(codes: &[u8], scales: &[u8], rows: usize, cols: usize) -> Result<Vec<u8>> {
    check(codes, scales, rows, cols)?;
    let mut out = Vec::with_capacity(packed_len(rows, cols)?);
    for (codes, scales) in codes.chunks_exact(BLOCK_ELEMENTS / 2).zip(scales.chunks_exact(SCALES)) {
        out.extend_from_slice(scales);
        for sub_block in codes.chunks_exact(BLOCK / 2) {
            out.extend((0..8).map(|j| e2m1::pack(e2m1::code_at(sub_block, j), e2m1::code_at(sub_block, j + 8))));
        }
    }
    Ok(out)
}

/// Unpacks GGUF blocks into codes and scales.
pub fn unpack(packed: &[u8], rows: usize, cols: usize) -> Result<(Vec<u8>, Vec<u8>)> {
    let blocks = blocks(rows, cols)?;
    check_len("GGUF data", packed_len(rows, cols)?, packed.len())?;
    let mut codes = Vec::with_capacity(blocks * BLOCK_ELEMENTS / 2);
    let mut scales = Vec::with_capacity(blocks * SCALES);
    for block in packed.chunks_exact(BLOCK_BYTES) {
        let (head, body) = block.split_at(SCALES);
        scales.extend_from_slice(head);
        for sub_block in body.chunks_exact(BLOCK / 2) {
            let code = |i: usize| e2m1::unpack(sub_block[i % 8])[i / 8];
            codes.extend((0..8).map(|j| e2m1::pack(code(2 * j), code(2 * j + 1))));
        }
    }
    Ok((codes, scales))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes 7 6 6 4 4 2 2 0 8 a a c c e e f, whose packed forms were read off the real tools.
    const LINEAR: [u8; 8] = [0x67, 0x46, 0x24, 0x02, 0xA8, 0xCA, 0xEC, 0xFE];
    const GGUF: [u8; 8] = [0x87, 0xA6, 0xA6, 0xC4, 0xC4, 0xE2, 0xE2, 0xF0];

    #[test]
    fn pairs_elements_eight_apart() {
        let packed = pack(&LINEAR.repeat(4), &[1, 2, 3, 0x7E], 1, 64).unwrap();
        assert_eq!(packed[..4], [1, 2, 3, 0x7E]);
        assert_eq!(packed[4..], GGUF.repeat(4));
        assert_eq!(unpack(&packed, 1, 64).unwrap(), (LINEAR.repeat(4), vec![1, 2, 3, 0x7E]));
    }

    #[test]
    fn refuses_what_gguf_cannot_hold() {
        let message = |scales: &[u8], cols| pack(&[0; 32], scales, 1, cols).unwrap_err().to_string();
        assert_eq!(message(&[0; 4], 80), "columns of a GGUF matrix: expected a multiple of 64, got 80");
        assert_eq!(message(&[0; 3], 64), "scales: expected length 4, got 3");
        for byte in [0x7F, 0x80, 0xFF] {
            assert!(matches!(pack(&[0; 32], &[0, byte, 0, 0], 1, 64), Err(Error::ScaleByte { index: 1, .. })));
        }
        assert_eq!(unpack(&[0; 35], 1, 64).unwrap_err().to_string(), "GGUF data: expected length 36, got 35");
        assert_eq!(pack(&[], &[], 0, 64), Ok(vec![]));
    }
}
