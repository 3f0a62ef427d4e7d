//! Kernels built by g++ and run on the host, for tests on machines without a GPU: slow, but every
//! index, mask and barrier is the kernel's own. Code behind `__CUDACC__` and hardware conversions
//! are not covered.

use std::io::ErrorKind;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Every operation rounds once. Undefined behaviour ends the process, including unaligned vectors
/// and indices out of bounds.
const OPTIONS: [&str; 9] = [
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=undefined",
    "-fsanitize-undefined-trap-on-error",
];

/// A kernel built by the host's compiler.
pub(crate) struct Emulated(libloading::Library);

impl Emulated {
    /// Builds a kernel; reports if there is no g++. A text that does not compile is a failure.
    pub fn build(function: &str, text: &str) -> Option<Emulated> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("nvfp4-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let own = std::env::temp_dir().join(name);
        let (file, library) = (own.with_extension("cpp"), own.with_extension("so"));
        let define = format!("#define FUNCTION {function}");
        std::fs::write(&file, [include_str!("emulate.h"), text, &define, include_str!("emulate_run.h")].join("\n"))
            .unwrap();
        let output = match Command::new("g++").args(OPTIONS).arg(&file).arg("-o").arg(&library).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                nvfp4_testing::missing(nvfp4_testing::Need::Gxx, "there is no g++");
                return None;
            }
            output => output.unwrap(),
        };
        assert!(output.status.success(), "g++: {}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library has no initialisers.
        let loaded = unsafe { libloading::Library::new(&library) }.unwrap();
        // A loaded library does not need its file.
        std::fs::remove_file(&file).unwrap();
        std::fs::remove_file(&library).unwrap();
        Some(Emulated(loaded))
    }

    /// Runs `grid` groups of `threads` threads, one after the other; addresses are the host's. One
    /// run at a time.
    pub fn run<P: Copy>(&self, grid: u32, threads: u32, params: &P) {
        // SAFETY: emulate_run.h defines a function of this name and signature.
        let run = unsafe { self.0.get::<unsafe extern "C" fn(u32, u32, *const P)>(b"run") }.unwrap();
        // SAFETY: the kernel's own parameters, laid out alike, with addresses of memory that the
        // caller holds.
        unsafe { run(grid, threads, params) }
    }
}
