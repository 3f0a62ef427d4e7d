//! The GPU runtime on a GPU: copies, kernels, graphs and errors. Without a GPU or NVRTC each test
//! is skipped.
#![cfg(feature = "cuda")]

use nvfp4_kernels::cuda::{self, Buffer, Device, Error, Event, Kernel, Place, Slice, SliceMut, Stream};
use nvfp4_testing::{Need, missing};

/// `x[i] = a·x[i] + i` for i < n, through dynamic shared memory.
const TEXT: &str = r#"
struct Params { float* x; unsigned n; float a; };
extern __shared__ float staged[];
extern "C" __global__ void step(Params p) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) { staged[threadIdx.x] = p.x[i]; p.x[i] = p.a * staged[threadIdx.x] + float(i); }
}
"#;

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    n: u32,
    a: f32,
}

fn device() -> Option<Device> {
    let ready = Device::open(0).and_then(|device| cuda::compiler_version().map(|_| device));
    ready.inspect_err(|reason| missing(Need::Gpu, reason)).ok()
}

fn step(kernel: Kernel, stream: &Stream, x: SliceMut<'_, f32>, shared: u32) -> cuda::Result<()> {
    let params = Params { x: x.address(), n: x.len() as u32, a: 2.0 };
    let grid = [params.n.div_ceil(128), 1, 1];
    // SAFETY: `Params` is declared alike on both sides, and x is borrowed to write; every test
    // waits for its stream.
    unsafe { kernel.launch(stream, grid, 128, shared, &params) }
}

#[test]
fn without_a_gpu_the_doctor_says_what_is_missing() {
    let report = cuda::doctor();
    println!("{report:#?}");
    for problem in report.problems() {
        println!("{problem}");
    }
    assert_eq!(report.devices.is_ok(), Device::count().is_ok());
}

#[test]
fn a_device_is_opened_once() {
    let Some(device) = device() else { return };
    println!("{:?} {:?}", device, device.properties());
    assert_eq!(Device::open(0), Ok(device));
    let count = Device::count().unwrap();
    assert_eq!(Device::open(count), Err(Error::Ordinal { asked: count, count }));
    let (free, total) = device.memory_info().unwrap();
    assert!(0 < free && free <= total && device.driver().major >= 12);
    device.make_current().unwrap();
}

#[test]
fn copies_and_fills() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let values: Vec<u32> = (0..1_000_003).collect();
    let source = stream.to_device(&values).unwrap();
    let mut target: Buffer<u32> = device.alloc(values.len()).unwrap();
    stream.fill_bytes(target.slice_mut(), 0xA5).unwrap();
    stream.copy(source.slice().range(10..1000), target.slice_mut().range(0..990)).unwrap();
    let got = stream.to_host(target.slice()).unwrap();
    assert!(got[..990] == values[10..1000] && got[990..].iter().all(|&x| x == 0xA5A5_A5A5));
    let nothing: Buffer<f32> = device.alloc(0).unwrap();
    assert_eq!(stream.to_host(nothing.slice()).unwrap(), []);
}

#[test]
fn a_kernel_runs_in_foreign_streams_too() {
    let Some(device) = device() else { return };
    let kernel = device.kernel("step", "step", TEXT).unwrap();
    let own = Stream::new(device).unwrap();
    // SAFETY: null is the default stream, and `own` outlives what is borrowed from it.
    for stream in unsafe { [Stream::borrow(device, std::ptr::null_mut()), Stream::borrow(device, own.raw())] } {
        for (len, shared) in [(0, 512), (1, 512), (1000, 512), (1000, 100 << 10), (1000, 60 << 10)] {
            let mut x = stream.to_device(&vec![1.5f32; len]).unwrap();
            step(kernel, &stream, x.slice_mut(), shared).unwrap();
            let expected: Vec<f32> = (0..len).map(|i| 3.0 + i as f32).collect();
            assert_eq!(stream.to_host(x.slice()).unwrap(), expected);
        }
    }
    assert!(kernel.max_blocks_per_sm(128, 512).unwrap() >= 8);
    assert_eq!(kernel.max_blocks_per_sm(128, 100 << 10).map(|blocks| blocks <= 2), Ok(true));
}

#[test]
fn a_stream_waits_for_another() {
    let Some(device) = device() else { return };
    let kernel = device.kernel("step", "step", TEXT).unwrap();
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (len, steps) = (1 << 22, 20);
    let mut x = first.to_device(&vec![1.0f32; len]).unwrap();
    let mut copy: Buffer<f32> = device.alloc(len).unwrap();
    let done = Event::new(device).unwrap();
    for _ in 0..steps {
        step(kernel, &first, x.slice_mut(), 512).unwrap();
    }
    done.record(&first).unwrap();
    second.wait(&done).unwrap();
    second.copy(x.slice(), copy.slice_mut()).unwrap();
    let got = second.to_host(copy.slice()).unwrap();
    let expected = |i: usize| (0..steps).fold(1.0f32, |x, _| 2.0 * x + i as f32);
    assert_eq!(got.iter().enumerate().position(|(i, &x)| x != expected(i)), None);
}

#[test]
fn many_threads_get_one_kernel() {
    let Some(device) = device() else { return };
    std::thread::scope(|scope| {
        for i in 0..16 {
            scope.spawn(move || {
                let text = format!("{TEXT}// {}", i % 3);
                let kernel = device.kernel("step", "step", &text).unwrap();
                let stream = Stream::new(device).unwrap();
                let mut x = stream.to_device(&[i as f32]).unwrap();
                step(kernel, &stream, x.slice_mut(), 512).unwrap();
                assert_eq!(stream.to_host(x.slice()).unwrap(), [2.0 * i as f32]);
            });
        }
    });
}

#[test]
fn a_graph_repeats_what_was_captured() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let kernel = device.kernel("step", "step", TEXT).unwrap();
    let mut x = stream.to_device(&[1.0f32, 1.0]).unwrap();
    let graph = stream.capture(|stream| step(kernel, stream, x.slice_mut(), 512)).unwrap();
    assert_eq!(stream.to_host(x.slice()).unwrap(), [1.0, 1.0], "capturing runs nothing");
    let (start, end) = (Event::new(device).unwrap(), Event::new(device).unwrap());
    start.record(&stream).unwrap();
    for _ in 0..3 {
        // SAFETY: x and the graph outlive the runs, which are waited for below.
        unsafe { graph.launch(&stream) }.unwrap();
    }
    end.record(&stream).unwrap();
    assert!(end.elapsed_us(&start).unwrap() > 0.0);
    assert_eq!(stream.to_host(x.slice()).unwrap(), [8.0, 15.0]);
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let refused = stream.capture(|stream| stream.synchronize());
    assert!(matches!(refused, Err(Error::Driver { call: "cuStreamSynchronize", .. })), "{refused:?}");
    let own = stream.capture(|_| Err(Error::NoDevice));
    assert_eq!(own.unwrap_err(), Error::NoDevice);
    let panicked = std::panic::catch_unwind(|| stream.capture::<Error>(|_| panic!("on purpose")));
    assert!(panicked.is_err());
    let empty = stream.capture::<Error>(|_| Ok(())).unwrap();
    // SAFETY: it has no memory, and is waited for.
    unsafe { empty.launch(&stream) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(stream.to_host(stream.to_device(&[7u8]).unwrap().slice()).unwrap(), [7]);
}

#[test]
fn mistakes_are_told_and_do_no_harm() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let bytes = 1usize << 50;
    assert_eq!(device.alloc::<u8>(bytes).unwrap_err(), Error::OutOfMemory { bytes });
    assert_eq!(device.alloc::<f32>(usize::MAX).unwrap_err(), Error::OutOfMemory { bytes: usize::MAX });
    let host = [0u8; 64];
    // SAFETY: the addresses are looked up, never used.
    let (on_host, nowhere) = unsafe { (Slice::<u8>::from_raw(host.as_ptr() as u64, 64), Slice::<u8>::from_raw(8, 1)) };
    for slice in [on_host, nowhere] {
        assert_eq!(slice.check(device, "x"), Err(Error::NotDeviceMemory { what: "x" }));
    }
    let mut buffer = device.alloc::<f32>(100).unwrap();
    assert_eq!(buffer.slice().range(50..60).check(device, "x"), Ok(()));
    let (here, elsewhere) = (device.ordinal(), device.ordinal() + 1);
    // SAFETY: as above; what is said about the places is compared, and the driver is not asked.
    let [known, other] = [here, elsewhere].map(|at| unsafe { nowhere.known(Place::On(at)) });
    assert_eq!(known.check(device, "x"), Ok(()));
    let wrong = Error::WrongDevice { what: "x", expected: here, got: elsewhere };
    assert_eq!(other.range(0..1).check(device, "x"), Err(wrong));
    assert!(matches!(device.kernel("bad", "f", "__global__ void f() { x; }"), Err(Error::Compile { .. })));
    let missing = device.kernel("step", "stop", TEXT).unwrap_err();
    assert_eq!(missing.to_string(), "NVRTC cannot compile the kernel 'step':\nit has no function 'stop'");
    let kernel = device.kernel("step", "step", TEXT).unwrap();
    assert!(matches!(step(kernel, &stream, buffer.slice_mut(), 1 << 20), Err(Error::Driver { .. })), "too much shared");
    let params = Params { x: 0, n: 0, a: 0.0 };
    // SAFETY: nothing runs: the grids are too large or empty.
    let launch = |grid| unsafe { kernel.launch(&stream, grid, 128, 0, &params) };
    assert!(matches!(launch([1, 65536, 1]), Err(Error::GridTooLarge { .. })));
    assert_eq!(launch([1, 0, 1]), Ok(()));
    stream.fill_bytes(buffer.slice_mut(), 0).unwrap();
    step(kernel, &stream, buffer.slice_mut(), 512).unwrap();
    assert_eq!(stream.to_host(buffer.slice()).unwrap()[99], 99.0);
}
