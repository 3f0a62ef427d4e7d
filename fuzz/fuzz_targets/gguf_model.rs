//! A whole GGUF file, verified and decoded. Bytes choose its keys, its tensors, their dimensions and types, and which bytes of the
//! finished file are damaged.
#![no_main]

mod choices;

use choices::Choices;
use nvfp4_checkpoint::fuzzed::check_gguf_file;

const NAMES: [&str; 8] = [
    "blk.0.attn_q.weight",
    "blk.0.attn_q.scale",
    "blk.0.ffn_up_exps.weight",
    "blk.0.ffn_up_exps.scale",
    "token_embd.weight",
    "output_norm.weight",
    "rope_freqs.weight",
    "",
];

const SIZES: [u64; 12] = [64, 1, 2, 128, 4, 0, 3, 256, 1 << 20, 1 << 40, 1 << 63, u64::MAX];

/// Types by their numbers: NVFP4, F32, F16, BF16, others that are known, one that is not.
const KINDS: [u32; 9] = [40, 0, 1, 30, 2, 12, 39, 27, 77];

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Bytes that a tensor takes, if that can be said.
fn byte_len(kind: u32, dims: &[u64]) -> Option<u64> {
    let (elements, bytes) = match kind {
        40 => (64, 36),
        0 => (1, 4),
        1 | 30 => (1, 2),
        2 => (32, 18),
        12 => (256, 144),
        39 => (32, 17),
        27 => (1, 8),
        _ => (1, 1),
    };
    let count = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    (count / elements).checked_mul(bytes)
}

libfuzzer_sys::fuzz_target!(init: choices::on_this_thread(), |data: &[u8]| {
    let mut bytes = Choices(data);
    let (mut names, mut tensors, mut at) = (Vec::new(), Vec::new(), 0u64);
    for _ in 0..bytes.byte() % 6 {
        let name = bytes.pick(&NAMES);
        if names.contains(&name) && !bytes.seldom() {
            continue;
        }
        names.push(name);
        let (kind, rank) = (bytes.pick(&KINDS), 1 + bytes.byte() % 4);
        let dims: Vec<u64> = (0..rank).map(|_| bytes.pick(&SIZES)).collect();
        text(&mut tensors, name);
        tensors.extend(u32::from(rank).to_le_bytes());
        dims.iter().for_each(|d| tensors.extend(d.to_le_bytes()));
        tensors.extend(kind.to_le_bytes());
        tensors.extend(at.to_le_bytes());
        at += byte_len(kind, &dims).filter(|len| *len <= 1 << 16).unwrap_or(0).next_multiple_of(32);
    }
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((names.len() as u64).to_le_bytes());
    file.extend(3u64.to_le_bytes());
    text(&mut file, "general.architecture");
    file.extend(8u32.to_le_bytes());
    text(&mut file, "llama");
    text(&mut file, "llama.block_count");
    file.extend(10u32.to_le_bytes());
    file.extend(bytes.pick(&SIZES).to_le_bytes());
    text(&mut file, "tokenizer.ggml.tokens");
    file.extend([9u32, bytes.pick(&[8, 5, 6, 4, 12, 9])].into_iter().flat_map(u32::to_le_bytes));
    file.extend(bytes.pick(&[0u64, 1 << 40, u64::MAX]).to_le_bytes());
    file.extend(tensors);
    let (first, step) = (bytes.byte(), bytes.byte());
    let data = file.len().next_multiple_of(32);
    file.resize(data, 0);
    file.extend((0..at).map(|i| first.wrapping_add((i as u8).wrapping_mul(step))));
    bytes.damage(&mut file);
    check_gguf_file(file);
});
