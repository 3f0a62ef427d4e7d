//! `tokenizer.json` and `tokenizer.model`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nvfp4_checkpoint::gguf::check_tokenizer(data);
});
