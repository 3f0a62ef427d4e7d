//! The header of a safetensors file: the first byte says how many bytes of tensors follow it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some((&len, header)) = data.split_first() {
        nvfp4_checkpoint::check_header(header, u64::from(len));
    }
});
