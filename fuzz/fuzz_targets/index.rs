//! The index of a checkpoint of several files.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nvfp4_checkpoint::check_index(data);
});
