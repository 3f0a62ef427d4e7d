//! One safetensors file: its header, checked before anything is believed, and its bytes by
//! position.
//!
//! A file is 8 bytes of header length, that much JSON, then the tensors without gaps. Nothing is
//! allocated for what a header merely claims.

use super::transpose::transpose;
use crate::{Error, Result};
use nvfp4_files::positioned::Bytes;
use nvfp4_files::{regular, unique_keys};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The longest header that is read, the limit of the safetensors library.
pub const MAX_HEADER: u64 = 100_000_000;

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape; a scalar has no dimensions.
    pub shape: Vec<usize>,
    /// Where its bytes start in the file.
    pub start: u64,
    /// How many bytes it has.
    pub len: u64,
    /// The order of its elements in the file.
    pub(super) order: Order,
}

/// How the elements of a tensor lie in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Row by row, as its shape says.
    Rows,
    /// Column by column, each this many bytes after the one before: some columns of a matrix that
    /// is stored with inputs before outputs.
    Columns(u64),
}

/// An open safetensors file whose header has been checked.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: Bytes,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    /// Opens a file and checks its header: lengths, types, and that tensors fill the file without
    /// gap or overlap.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(path, Bytes::File(regular::open(path)?))
    }

    /// A file that is in memory; errors call it `path`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::new(path, Bytes::Memory(bytes))
    }

    fn new(path: &Path, bytes: Bytes) -> Result<Self> {
        let io = |source| Error::io(path, source);
        let file_len = bytes.byte_len().map_err(io)?;
        let invalid = |reason: String| Error::content(path, reason);
        let Some(body_len) = file_len.checked_sub(8) else {
            return Err(invalid(format!("expected a safetensors file, got {file_len} bytes; it is truncated")));
        };
        let mut prefix = [0; 8];
        bytes.read_exact(&mut prefix, 0).map_err(io)?;
        if prefix.starts_with(b"GGUF") {
            return Err(invalid(
                "this is a GGUF file, not safetensors; convert the checkpoint it was made from".into(),
            ));
        }
        let header_len = u64::from_le_bytes(prefix);
        if header_len > body_len {
            let mut first = [0; 1];
            if body_len > 0 {
                bytes.read_exact(&mut first, 8).map_err(io)?;
            }
            return Err(invalid(too_long(&prefix, &first[..body_len.min(1) as usize], file_len)));
        }
        if header_len > MAX_HEADER {
            return Err(invalid(too_large(header_len)));
        }
        let mut header = vec![0; header_len as usize];
        bytes.read_exact(&mut header, 8).map_err(io)?;
        let (tensors, metadata) = parse(&header, body_len - header_len).map_err(invalid)?;
        let tensors = tensors.into_iter().map(|t| TensorInfo { start: t.start + 8 + header_len, ..t }).collect();
        Ok(TensorFile { path: path.to_path_buf(), bytes, tensors, metadata })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Its free-form metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads the bytes of a tensor from `offset` on. Bytes that it does not have are an error.
    pub fn read(&self, tensor: &TensorInfo, offset: u64, bytes: &mut [u8]) -> Result<()> {
        match tensor.order {
            Order::Rows => read_part(&self.bytes, &self.path, (&tensor.name, tensor.start, tensor.len), offset, bytes),
            Order::Columns(stride) => self.read_columns(tensor, stride, offset, bytes),
        }
    }

    /// Reads a part of a matrix whose rows are columns in the file, some rows at a time.
    fn read_columns(&self, tensor: &TensorInfo, stride: u64, offset: u64, bytes: &mut [u8]) -> Result<()> {
        /// What is held in memory beside the result.
        const MOST: usize = 4 << 20;
        let (cols, size) = (tensor.shape[1], tensor.dtype.bitsize() / 8);
        let row = cols * size;
        let end = offset.saturating_add(bytes.len() as u64);
        if end > tensor.len {
            // An error with its words.
            return read_part(&self.bytes, &self.path, (&tensor.name, tensor.start, tensor.len), offset, bytes);
        }
        let rows = (offset as usize / row.max(1))..(end as usize).div_ceil(row.max(1));
        let step = (MOST / row.max(1)).max(1);
        let (mut stored, mut turned) = (Vec::new(), Vec::new());
        for first in rows.clone().step_by(step) {
            let count = step.min(rows.end - first);
            let (wide, at) = (count * size, (first * size) as u64);
            stored.resize(count * row, 0);
            turned.resize(count * row, 0);
            let part = |column: usize| (tensor.name.as_str(), tensor.start + column as u64 * stride, at + wide as u64);
            match wide as u64 == stride {
                true => read_part(&self.bytes, &self.path, (&tensor.name, tensor.start, tensor.len), 0, &mut stored)?,
                false => stored
                    .chunks_exact_mut(wide)
                    .enumerate()
                    .try_for_each(|(column, bytes)| read_part(&self.bytes, &self.path, part(column), at, bytes))?,
            }
            transpose(&stored, cols, count, size, &mut turned);
            // The first and the last row may be wanted in part.
            let from = (first * row).max(offset as usize);
            let to = ((first + count) * row).min(end as usize);
            bytes[from - offset as usize..to - offset as usize]
                .copy_from_slice(&turned[from - first * row..to - first * row]);
        }
        Ok(())
    }

    /// The same file with other tensors in the place of some: parts of them, under names of their
    /// own.
    pub(super) fn replace(&mut self, parts: &mut BTreeMap<String, Vec<TensorInfo>>) {
        let old = std::mem::take(&mut self.tensors);
        self.tensors = old.into_iter().flat_map(|t| parts.remove(&t.name).unwrap_or_else(|| vec![t])).collect();
    }
}

/// Reads bytes of a tensor, given by its name, start and length, from `offset` in it on.
pub(super) fn read_part(
    from: &Bytes,
    path: &Path,
    (name, start, len): (&str, u64, u64),
    offset: u64,
    bytes: &mut [u8],
) -> Result<()> {
    let wrong = |reason: String| Error::content(path, format!("tensor '{name}': {reason}"));
    let wanted = bytes.len() as u64;
    if offset.checked_add(wanted).is_none_or(|end| end > len) {
        return Err(wrong(format!("{wanted} bytes from byte {offset} on were asked for, but it has {len}")));
    }
    from.read_exact(bytes, start.saturating_add(offset)).map_err(|source| match source.kind() {
        ErrorKind::UnexpectedEof => wrong("the file ends inside it; it became shorter since it was opened".to_string()),
        _ => Error::io(path, source),
    })
}

/// What is wrong with a file that is shorter than its header: it is truncated, or not a safetensors
/// file at all.
fn too_long(prefix: &[u8; 8], next: &[u8], file_len: u64) -> String {
    let header_len = u64::from_le_bytes(*prefix);
    match next {
        // Every header begins with a brace.
        [first] if *first != b'{' => {
            let what = match prefix {
                [b'P', b'K', 3, 4, ..] => "it is a ZIP archive, as PyTorch's .pt, .pth and .bin files are",
                [0x80, 2..=5, ..] => "it is a pickle, as old .pt, .pth and .bin files are",
                _ => "its first bytes are not the length of a header",
            };
            format!("this is not a safetensors file: {what}; use the model's .safetensors files")
        }
        _ if header_len > MAX_HEADER => too_large(header_len),
        _ => format!("a header of {header_len} bytes in a file of {file_len}; the file is truncated"),
    }
}

fn too_large(header_len: u64) -> String {
    format!("a header of {header_len} bytes, more than the {MAX_HEADER} that are allowed")
}

/// A header as it is written.
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut header = Header { metadata: BTreeMap::new(), tensors: Vec::new() };
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "__metadata__" => header.metadata = map.next_value()?,
                        _ => header.tensors.push((name, map.next_value()?)),
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

type Parsed = (Vec<TensorInfo>, BTreeMap<String, String>);

/// Checks a header against the number of bytes that follow it. Starts are counted from the end of
/// the header.
fn parse(header: &[u8], data_len: u64) -> std::result::Result<Parsed, String> {
    unique_keys(header).map_err(|e| format!("header: {e}"))?;
    let header: Header = serde_json::from_slice(header).map_err(|e| format!("header: {e}"))?;
    let named = header.tensors.into_iter().map(|(name, entry)| {
        tensor(&name, &entry).map(|t| (entry.data_offsets, t)).map_err(|e| format!("tensor '{name}': {e}"))
    });
    let mut tensors = named.collect::<std::result::Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|([start, end], _)| (*start, *end));
    let mut at = 0;
    for ([start, end], tensor) in &tensors {
        let name = &tensor.name;
        if *start < at {
            return Err(format!("tensor '{name}' starts at byte {start}, inside the tensor that ends at {at}"));
        }
        if *start > at {
            return Err(format!("tensor '{name}' starts at byte {start}, after a gap that starts at {at}"));
        }
        if *end > data_len {
            let missing = end - data_len;
            return Err(format!("tensor '{name}' ends {missing} bytes after the end of the file; it is truncated"));
        }
        at = *end;
    }
    if at != data_len {
        return Err(format!("{} bytes follow the last tensor", data_len - at));
    }
    Ok((tensors.into_iter().map(|(_, tensor)| tensor).collect(), header.metadata))
}

fn tensor(name: &str, entry: &Entry) -> std::result::Result<TensorInfo, String> {
    let dtype: Dtype = serde_json::from_value(entry.dtype.clone().into())
        .map_err(|_| format!("unknown type '{}'; this version does not read it", entry.dtype))?;
    let too_large = || format!("the shape {:?} has more elements than 64 bits can count", entry.shape);
    let elements = entry.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
    let bits = elements.checked_mul(dtype.bitsize() as u64).ok_or_else(too_large)?;
    let shape: Option<Vec<usize>> = entry.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let shape = shape.ok_or_else(too_large)?;
    let [start, end] = entry.data_offsets;
    let len = end.checked_sub(start).ok_or_else(|| format!("its bytes {start}..{end} end before they start"))?;
    if !bits.is_multiple_of(8) || bits / 8 != len {
        let shape = &entry.shape;
        return Err(format!("{dtype:?} of shape {shape:?} takes {} bytes, its offsets give {len}", bits.div_ceil(8)));
    }
    Ok(TensorInfo { name: name.to_string(), dtype, shape, start, len, order: Order::Rows })
}

/// Checks the text of a header, for fuzzing: whatever the bytes, this returns.
#[doc(hidden)]
pub fn check_header(header: &[u8], data_len: u64) -> bool {
    parse(header, data_len).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(header: &str, data_len: u64) -> String {
        parse(header.as_bytes(), data_len).unwrap_err()
    }

    fn one(dtype: &str, shape: &str, start: u64, end: u64) -> String {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
    }

    #[test]
    fn a_header_that_fits_is_read_in_the_order_of_bytes() {
        let text = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
        let (tensors, metadata) = parse(text.as_bytes(), 6).unwrap();
        assert_eq!(
            tensors.iter().map(|t| (t.name.as_str(), t.start, t.len)).collect::<Vec<_>>(),
            [("a", 0, 4), ("b", 4, 2)]
        );
        assert_eq!(metadata["format"], "pt");
    }

    #[test]
    fn a_truncated_file_is_named() {
        assert_eq!(
            error(&one("U8", "[8]", 0, 8), 5),
            "tensor 'a' ends 3 bytes after the end of the file; it is truncated"
        );
    }

    #[test]
    fn bytes_after_the_last_tensor_are_an_error() {
        assert_eq!(error(&one("U8", "[8]", 0, 8), 9), "1 bytes follow the last tensor");
    }

    #[test]
    fn overlapping_tensors_and_gaps_are_errors() {
        let two = |start: u64, end: u64| {
            let b = format!(r#""b":{{"dtype":"U8","shape":[4],"data_offsets":[{start},{end}]}}"#);
            format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},{b}}}"#)
        };
        assert_eq!(error(&two(2, 6), 8), "tensor 'b' starts at byte 2, inside the tensor that ends at 4");
        assert_eq!(error(&two(6, 10), 10), "tensor 'b' starts at byte 6, after a gap that starts at 4");
    }

    #[test]
    fn shapes_that_overflow_64_bits_are_errors() {
        let shape = "[4294967296,4294967296,2]";
        assert!(error(&one("U8", shape, 0, 0), 0).ends_with("has more elements than 64 bits can count"));
        let shape = "[9223372036854775807]";
        assert!(error(&one("F64", shape, 0, 8), 8).ends_with("has more elements than 64 bits can count"));
        assert!(error(&one("U8", "[18446744073709551616]", 0, 8), 8).starts_with("header: "));
    }

    #[test]
    fn offsets_that_do_not_fit_the_shape_are_errors() {
        assert_eq!(
            error(&one("F32", "[2]", 0, 4), 4),
            "tensor 'a': F32 of shape [2] takes 8 bytes, its offsets give 4"
        );
        assert_eq!(error(&one("U8", "[2]", 4, 2), 4), "tensor 'a': its bytes 4..2 end before they start");
        assert!(error(&one("U8", "[1]", u64::MAX - 1, u64::MAX), 4).contains("after a gap"));
    }

    #[test]
    fn unknown_types_are_named() {
        assert_eq!(error(&one("F2", "[2]", 0, 4), 4), "tensor 'a': unknown type 'F2'; this version does not read it");
    }

    #[test]
    fn a_tensor_that_stands_twice_is_an_error() {
        let text = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
        assert!(error(text, 0).contains("the key 'a' stands twice"));
    }

    #[test]
    fn what_is_not_a_header_is_an_error() {
        for text in ["", "[]", "{", "{\"a\":1}", "{\"a\":{\"dtype\":\"U8\"}}", "null", "{\"__metadata__\":3}"] {
            assert!(error(text, 0).starts_with("header: "), "{text}");
        }
    }
}
