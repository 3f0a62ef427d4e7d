//! `config.json` and `hf_quant_config.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nvfp4_checkpoint::check_config(data);
});
