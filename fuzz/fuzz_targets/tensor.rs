//! A quantized tensor in the library's own file format.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(tensor) = nvfp4::from_bytes(data) {
        let again = nvfp4::to_bytes(&tensor).and_then(|bytes| nvfp4::from_bytes(&bytes));
        assert!(again.is_ok(), "what is read can be written and read again");
    }
});
