//! Tools that a machine may lack: g++, NVRTC.

/// Says why a test is skipped. Where `NVFP4_REQUIRE_CUDA_TOOLS` is set, as in CI, the test fails instead.
pub fn skip(reason: impl std::fmt::Display) {
    assert!(std::env::var_os("NVFP4_REQUIRE_CUDA_TOOLS").is_none(), "{reason}");
    println!("skipped: {reason}");
}
