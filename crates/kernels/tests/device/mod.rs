//! The GPU of tests that need one.

use nvfp4_kernels::cuda::{self, Device, Stream};
use nvfp4_testing::{Need, missing};

/// A stream of the first GPU; without one, the test that asks is skipped.
pub fn stream() -> Option<Stream> {
    let stream = cuda::compiler_version().and_then(|_| Device::open(0)).and_then(Stream::new);
    stream.inspect_err(|reason| missing(Need::Gpu, reason)).ok()
}
