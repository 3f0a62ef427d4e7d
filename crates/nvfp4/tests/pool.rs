//! The driver's pool. Alone in its program: another test's work on the same GPU could be handed the memory
//! first.
#![cfg(feature = "cuda")]

use nvfp4::cuda::{Device, Gpu, Pool};
use nvfp4_kernels::cuda::Allocator;
use nvfp4_testing::{Need, missing};

#[test]
fn the_pool_hands_memory_out_again_in_the_order_of_its_stream() {
    let gpu = match Device::open(0).map_err(nvfp4::Error::from).and_then(Gpu::new) {
        Ok(gpu) => gpu,
        Err(reason) => return missing(Need::Gpu, reason),
    };
    let first = Pool.bytes(gpu.stream(), 1000).unwrap();
    let address = first.address();
    assert_eq!((first.len(), address % 256), (1000, 0));
    drop(first);
    let again = Pool.bytes(gpu.stream(), 1000).unwrap();
    assert_eq!(again.address(), address);
    let other = Pool.bytes(gpu.stream(), 1000).unwrap();
    assert_ne!(other.address(), address);
}
