//! cuBLASLt, NVIDIA's library: products on the tensor cores for bf16, FP8, and on newer chips NVFP4
//! and MXFP8. Optional: without it, kernels of this crate multiply.
//!
//! The few functions that are needed are declared in `library.rs`, not taken from cudarc. So
//! several libraries can be tried one after another (one that is newer than the driver loads but
//! does not start), and a missing function is not a panic.

mod library;
mod plan;
mod recent;

use super::scratch::Scratch;
use crate::Result;
use crate::cuda::{self, Allocator, Device, Error, Slice, SliceMut, Stream, Version, lock};
use crate::input::check_len;
use half::bf16;
use library::*;
use nvfp4_spec::fp8::Format;
use nvfp4_spec::gemm::Accumulator;
use nvfp4_spec::{Precision, area};
use plan::{Key, Plan, set_addresses};
use recent::Recent;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Mutex;

/// cuBLASLt on one GPU. Products of any number of streams and threads may use it.
pub struct Cublas {
    /// `None` for what the library does not compute.
    plans: Mutex<Recent<Key, Option<Plan>>>,
    session: Session,
}

/// How many plans are kept at least. A model needs some tens, but experts have other numbers of tokens at
/// every step.
const PLANS: usize = 4096;

/// The type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Values {
    Bf16,
    Fp8(Format),
    /// Two codes to a byte, the first in the low half.
    E2m1,
}

/// What the scales of an operand belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScaleMode {
    /// The whole matrix.
    Tensor,
    /// 128 values of a row. The scales of the first 128 columns come first, one per row.
    Row128,
    /// A square of 128 × 128. Rows of scales start at multiples of four.
    Square128,
    /// 16 values along K: E4M3 bytes, swizzled.
    Block16,
    /// 32 values along K: E8M0 bytes, swizzled.
    Block32,
}

/// An operand as it lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    pub address: u64,
    pub values: Values,
    /// Elements from one row to the next.
    pub pitch: usize,
    /// Whether what lies there is the transposed operand.
    pub transposed: bool,
    /// Scales of codes, and their address.
    pub scales: Option<(ScaleMode, u64)>,
}

/// The factors α and β.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factors {
    Values(f32, f32),
    /// Two numbers in the memory of the GPU.
    Memory(u64),
}

/// `out = α·A·Bᵀ + β·C (+ bias)`, of checked operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// M, N and K, none of them 0.
    pub sizes: [usize; 3],
    pub a: Side,
    pub b: Side,
    pub factors: Factors,
    /// The address of C; that of the outputs if there is none and β is 0.
    pub c: u64,
    pub out: u64,
    pub precision: Precision,
    /// The address of a bias in the type of the outputs.
    pub bias: Option<u64>,
    pub accumulator: Accumulator,
}

impl Cublas {
    /// Loads the library and sets it up, or says why it cannot be used; [`Error::NoCublas`] where
    /// there is none.
    pub fn open(device: Device) -> cuda::Result<Cublas> {
        let mut reason = Error::NoCublas;
        for api in candidates().iter().filter_map(Api::load) {
            match Session::new(device, api) {
                Ok(session) => return Ok(Cublas { plans: Mutex::new(Recent::new(PLANS)), session }),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    /// The library for products on this GPU, opened once; `None` where it cannot be used, and for a
    /// [portable](Device::portable) GPU, which runs the kernels of this crate.
    pub(super) fn of(device: Device) -> Option<&'static Cublas> {
        static OPEN: Mutex<Option<HashMap<usize, Option<&'static Cublas>>>> = Mutex::new(None);
        if device.portable() {
            return None;
        }
        let mut open = lock(&OPEN);
        let libraries = open.get_or_insert_default();
        *libraries
            .entry(device.ordinal())
            .or_insert_with(|| Cublas::open(device).ok().map(|library| &*Box::leak(Box::new(library))))
    }

    /// Its version.
    pub fn version(&self) -> Version {
        // SAFETY: it takes nothing and gives a number.
        let number = unsafe { (self.session.api.version)() };
        Version { major: (number / 10000) as u32, minor: (number / 100 % 100) as u32 }
    }

    /// `out = A·Bᵀ`, row-major: M × K, N × K and M × N, with sums in binary32. Does not wait.
    ///
    /// The first call of a shape chooses an algorithm and may load it, which a capture refuses: run
    /// a product once before capturing it.
    pub fn matmul_bf16(
        &self,
        stream: &Stream,
        a: Slice<'_, bf16>,
        b: Slice<'_, bf16>,
        (m, n, k): (usize, usize, usize),
        out: SliceMut<'_, bf16>,
        memory: &dyn Allocator,
    ) -> Result<()> {
        let device = self.session.device;
        device.expect("the stream of a product", stream.device().ordinal())?;
        check_len("A", area(m, k)?, a.len())?;
        check_len("B", area(n, k)?, b.len())?;
        check_len("output", area(m, n)?, out.len())?;
        for (slice, what) in [(a, "A"), (b, "B"), (out.as_slice(), "output")] {
            slice.check(device, what)?;
            slice.check_aligned(size_of::<bf16>(), what)?;
        }
        if out.is_empty() {
            return Ok(());
        }
        if k == 0 {
            return Ok(stream.fill_bytes(out, 0)?);
        }
        let side = |slice: Slice<'_, bf16>| Side {
            address: slice.address(),
            values: Values::Bf16,
            pitch: k,
            transposed: false,
            scales: None,
        };
        let call = Call {
            sizes: [m, n, k],
            a: side(a),
            b: side(b),
            factors: Factors::Values(1.0, 0.0),
            c: out.address(),
            out: out.address(),
            precision: Precision::Bf16,
            bias: None,
            accumulator: Accumulator::Precise,
        };
        Ok(self.run(stream, &call, memory)?)
    }

    /// Whether the library computes such a product.
    pub(super) fn takes(&self, call: &Call) -> cuda::Result<bool> {
        Ok(self.scratch(call)?.is_some())
    }

    /// The bytes of scratch of a product; `None` if the library does not compute it.
    pub(super) fn scratch(&self, call: &Call) -> cuda::Result<Option<usize>> {
        let mut plans = lock(&self.plans);
        Ok(self.plan(&mut plans, call)?.map(|plan| plan.workspace))
    }

    /// How a product is computed; `None` if the library does not compute it.
    fn plan<'a>(&self, plans: &'a mut Recent<Key, Option<Plan>>, call: &Call) -> cuda::Result<Option<&'a Plan>> {
        let key = Key::new(call);
        let make = || {
            let _current = self.session.device.enter()?;
            Plan::new(&self.session, &key, call)
        };
        Ok(plans.get_or_try_make(&key, make)?.as_ref())
    }

    /// Queues a product; an error unless the library [takes](Cublas::takes) it.
    pub(super) fn run(&self, stream: &Stream, call: &Call, memory: &dyn Allocator) -> cuda::Result<()> {
        // Before the lock: an allocator may wait for other threads.
        let bytes = self.scratch(call)?.ok_or_else(|| refused(call))?;
        let scratch = Scratch::new(stream, memory, [bytes])?;
        self.run_in(stream, call, (scratch.addresses[0], bytes))
    }

    /// [`Cublas::run`] with [scratch](Cublas::scratch): its address, a multiple of 256, and its bytes.
    pub(super) fn run_in(&self, stream: &Stream, call: &Call, (scratch, bytes): (u64, usize)) -> cuda::Result<()> {
        let api = self.session.api;
        let _current = self.session.device.enter()?;
        // Addresses are set in the plan's own description, so the lock is held until the call.
        let mut plans = lock(&self.plans);
        let plan = self.plan(&mut plans, call)?.filter(|plan| plan.workspace <= bytes).ok_or_else(|| refused(call))?;
        set_addresses(&plan.operation, &api, call)?;
        let [b, a, c, d] = [call.b.address, call.a.address, call.c, call.out].map(|address| address as *mut c_void);
        let values: [f32; 2];
        let factors: [*const c_void; 2] = match call.factors {
            Factors::Values(alpha, beta) => {
                values = [alpha, beta];
                [(&raw const values[0]).cast(), (&raw const values[1]).cast()]
            }
            Factors::Memory(at) => [at as *const c_void, (at + 4) as *const c_void],
        };
        // SAFETY: a context is current; the caller has checked lengths and alignments of all that
        // the descriptors describe, and everything is memory of this GPU. Factors in host memory
        // are read before the call returns. With a factor of 0, C is not read.
        let status = unsafe {
            (api.matmul)(
                self.session.handle,
                plan.operation.raw,
                factors[0],
                b,
                plan.b.raw,
                a,
                plan.a.raw,
                factors[1],
                c,
                plan.out.raw,
                d,
                plan.out.raw,
                &plan.algorithm,
                scratch as *mut c_void,
                plan.workspace,
                stream.raw(),
            )
        };
        api.check("cublasLtMatmul", status)
    }
}

/// The error of a product that the library does not compute.
fn refused(call: &Call) -> Error {
    let [m, n, k] = call.sizes;
    Error::Driver {
        call: "cublasLtMatmulAlgoGetHeuristic",
        code: NOT_SUPPORTED as u32,
        text: format!("no algorithm for {m} × {n} × {k}"),
    }
}

impl fmt::Debug for Cublas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cublas({}, {:?})", self.version(), self.session.device)
    }
}
