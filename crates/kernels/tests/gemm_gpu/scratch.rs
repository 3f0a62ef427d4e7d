//! Scratch of products on several streams, in several threads and in graphs.

use super::*;

/// A product whose operands are both quantized, so that it needs scratch: the same operands and the
/// same result each time.
struct Repeated {
    a: Copied<'static>,
    b: Copied<'static>,
    expected: Vec<f32>,
}

impl Repeated {
    fn new(stream: &Stream, (m, n, k): (usize, usize, usize), seed: u32) -> Self {
        // What is copied borrows from it.
        let matrix = |rows, seed| &*Box::leak(Box::new(quantized(rows, k, seed, per(GlobalScale::PerTensor))));
        let there = |rows, seed| Copied::new(stream, matrix(rows, seed), Layout::Linear);
        let (a, b) = (there(m, seed), there(n, seed + 1));
        let expected = run::<f32>(stream, a.view(), b.view(), &Product::default());
        Repeated { a, b, expected }
    }

    fn queue(&self, stream: &Stream, out: &mut Buffer<f32>) -> nvfp4_kernels::Result<()> {
        gemm(stream, self.a.view(), self.b.view(), &Product::default(), out.slice_mut(), &Pool)
    }

    fn check(&self, stream: &Stream, out: &Buffer<f32>, what: &str) {
        assert!(same(&stream.to_host(out.slice()).unwrap(), &self.expected), "{what}");
    }
}

/// Scratch belongs to a call, so threads and streams do not share it.
#[test]
fn products_on_several_streams_and_threads_at_once() {
    let Some(first) = stream() else { return };
    let device = first.device();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let streams = [Stream::new(device).unwrap(), Stream::new(device).unwrap()];
                let sizes = [(512, 384, 1024), (96, 640, 512 * (thread + 1))];
                let products: Vec<_> =
                    streams.iter().zip(sizes).map(|(s, size)| Repeated::new(s, size, 10 * thread as u32)).collect();
                for round in 0..50 {
                    let outs = products.iter().zip(&streams).map(|(product, stream)| {
                        let mut out = device.alloc(product.expected.len()).unwrap();
                        product.queue(stream, &mut out).unwrap();
                        out
                    });
                    let outs: Vec<_> = outs.collect();
                    for ((product, stream), out) in products.iter().zip(&streams).zip(&outs) {
                        product.check(stream, out, &format!("thread {thread}, round {round}"));
                    }
                }
            });
        }
    });
}

/// A graph has memory of its own: larger work after the capture, on the same stream or another,
/// does not affect replays.
#[test]
fn a_captured_product_replays_after_larger_work() {
    let Some(stream) = stream() else { return };
    let other = Stream::new(stream.device()).unwrap();
    let small = Repeated::new(&stream, (128, 256, 512), 1);
    let mut out = stream.device().alloc(small.expected.len()).unwrap();
    let graph = stream.capture(|stream| small.queue(stream, &mut out)).unwrap();
    let large = Repeated::new(&stream, (2048, 4096, 4096), 3);
    let mut large_out = stream.device().alloc(large.expected.len()).unwrap();
    for round in 0..10 {
        stream.fill_bytes(out.slice_mut(), 0xFF).unwrap();
        stream.synchronize().unwrap();
        large.queue(&stream, &mut large_out).unwrap();
        // SAFETY: everything that the graph uses is alive, and nothing else uses it.
        unsafe { graph.launch(if round % 2 == 0 { &stream } else { &other }) }.unwrap();
        large.check(&stream, &large_out, &format!("beside replay {round}"));
        other.synchronize().unwrap();
        small.check(&stream, &out, &format!("replay {round}"));
    }
}
