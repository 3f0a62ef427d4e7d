//! cuBLASLt, NVIDIA's library: bf16 products, which benchmarks compare ours with, and FP8 products
//! on the tensor cores of Hopper and newer GPUs. Optional: nothing else needs it.
//!
//! The few functions that are needed are declared in `library.rs`, not taken from cudarc. So
//! several libraries can be tried one after another (one that is newer than the driver loads but
//! does not start), and a missing function is not a panic.

mod library;

use crate::Result;
use crate::cuda::{self, Buffer, Device, Error, Plain, Slice, SliceMut, Stream, Version, lock};
use crate::fp8::cuda::View as Fp8View;
use crate::input::check_len;
use half::bf16;
use library::*;
use nvfp4_spec::fp8::{Format, Scales, Tile};
use nvfp4_spec::{Element, Error as RuleError, Precision, area};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Mutex;

/// Bytes of scratch memory for products.
const WORKSPACE: usize = 32 << 20;

/// cuBLASLt on one GPU, with scratch memory for its products. For one stream only: concurrent
/// products on two streams would share the scratch.
pub struct Cublas {
    plans: Mutex<HashMap<Key, Plan>>,
    /// Aᵀ·B, sums in binary32.
    operation: Descriptor,
    /// The same with scales in GPU memory for both operands, which are set for each product while
    /// `plans` is locked.
    scaled: Descriptor,
    workspace: Buffer<u8>,
    session: Session,
}

/// The key of a plan: the types of the right operand, the left operand and the outputs; M, N and K;
/// the alignments of the addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    types: [c_int; 3],
    sizes: [usize; 3],
    alignments: [u32; 3],
}

/// How products of one shape are computed.
struct Plan {
    weights: Descriptor,
    tokens: Descriptor,
    out: Descriptor,
    algorithm: Algorithm,
}

impl Cublas {
    /// Loads the library and sets it up, or says why it cannot be used; [`Error::NoCublas`] where
    /// there is none.
    pub fn open(device: Device) -> cuda::Result<Cublas> {
        let mut reason = Error::NoCublas;
        for api in candidates().iter().filter_map(Api::load) {
            match Session::new(device, api) {
                Ok(session) => return Cublas::new(session),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn new(session: Session) -> cuda::Result<Cublas> {
        let api = session.api;
        let operation = || -> cuda::Result<Descriptor> {
            // SAFETY: cuBLASLt writes one handle.
            let operation = Descriptor::new(&api, "cublasLtMatmulDescCreate", api.operation_destroy, |raw| unsafe {
                (api.operation_create)(raw, COMPUTE_32F, R_32F)
            })?;
            operation.set(&api, SET_OPERATION, api.operation_set, OPERATION_TRANSA, &TRANSPOSED)?;
            operation.set(&api, SET_OPERATION, api.operation_set, OPERATION_TRANSB, &AS_IT_IS)?;
            Ok(operation)
        };
        let workspace = session.device.alloc(WORKSPACE)?;
        Ok(Cublas { plans: Mutex::default(), operation: operation()?, scaled: operation()?, workspace, session })
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
        let addresses = [b.address(), a.address(), out.address()];
        Ok(self.run(stream, Key::new([R_16BF; 3], [m, n, k], addresses), addresses, None)?)
    }

    /// `out = A·Bᵀ` of two FP8 matrices with a 32-bit scale each; the scales are applied to the
    /// sums. Does not wait; see [`Cublas::matmul_bf16`] for captures.
    ///
    /// **Not** within [`nvfp4_spec::gemm::bound`]: the FP8 tensor cores of Hopper keep about 14
    /// bits of each summand, so an output may differ by K·2⁻¹² of its products' magnitudes.
    /// [`gemm::cuda`](crate::gemm::cuda) is precise, and slow.
    ///
    /// The library takes K and N that are multiples of 16, addresses that are multiples of 16
    /// bytes, and no two E5M2 matrices; it needs a GPU of compute capability 8.9 or newer.
    pub fn matmul_fp8<T: Element + Plain>(
        &self,
        stream: &Stream,
        a: &Fp8View<'_>,
        b: &Fp8View<'_>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        let device = self.session.device;
        device.expect("the stream of a product", stream.device().ordinal())?;
        let scales = [tensor_scale(b)?, tensor_scale(a)?];
        let (m, n, k) = (a.rows, b.rows, a.cols);
        if b.cols != k {
            return Err(RuleError::InnerLength { expected: k, got: b.cols }.into());
        }
        if (a.format, b.format) == (Format::E5m2, Format::E5m2) {
            let why = "cuBLASLt multiplies no two E5M2 matrices: quantize one to E4M3, or use `gemm::cuda`";
            return Err(RuleError::Combination(why).into());
        }
        for (what, got) in [("K of an FP8 product", k), ("N of an FP8 product", n)] {
            if !got.is_multiple_of(16) {
                return Err(RuleError::Multiple { what, of: 16, got }.into());
            }
        }
        check_len("A", area(m, k)?, a.codes.len())?;
        check_len("B", area(n, k)?, b.codes.len())?;
        check_len("output", area(m, n)?, out.len())?;
        for (slice, what) in [(a.codes, "A"), (b.codes, "B")] {
            slice.check(device, what)?;
            slice.check_aligned(16, what)?;
        }
        for scale in scales {
            scale.check(device, "scale")?;
            scale.check_aligned(size_of::<f32>(), "scale")?;
        }
        out.check(device, "output")?;
        out.check_aligned(16, "output")?;
        if out.is_empty() {
            return Ok(());
        }
        if k == 0 {
            return Ok(stream.fill_bytes(out, 0)?);
        }
        let addresses = [b.codes.address(), a.codes.address(), out.address()];
        let code = |format: Format| match format {
            Format::E4m3 => R_8F_E4M3,
            Format::E5m2 => R_8F_E5M2,
        };
        let output = match T::PRECISION {
            Precision::F32 => R_32F,
            Precision::Bf16 => R_16BF,
            Precision::F16 => R_16F,
        };
        let key = Key::new([code(b.format), code(a.format), output], [m, n, k], addresses);
        Ok(self.run(stream, key, addresses, Some(scales.map(|scale| scale.address())))?)
    }

    /// Runs a product of checked operands: the addresses of B, A and the outputs, and of both
    /// scales if there are any.
    fn run(&self, stream: &Stream, key: Key, addresses: [u64; 3], scales: Option<[u64; 2]>) -> cuda::Result<()> {
        let api = self.session.api;
        let _current = self.session.device.enter()?;
        let mut plans = lock(&self.plans);
        let operation = match scales {
            None => &self.operation,
            Some(scales) => {
                for (attribute, scale) in OPERATION_SCALES.into_iter().zip(scales) {
                    self.scaled.set(&api, SET_OPERATION, api.operation_set, attribute, &(scale as *const c_void))?;
                }
                &self.scaled
            }
        };
        let plan = match plans.entry(key) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(empty) => empty.insert(self.plan(key, operation)?),
        };
        let Plan { weights, tokens, out, algorithm } = &*plan;
        let [b, a, d] = addresses.map(|address| address as *mut c_void);
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let workspace = self.workspace.slice().address() as *mut c_void;
        // SAFETY: a context is current; the lengths were checked against the shape that the
        // descriptors were made for, and all is memory of this GPU, the scales too. Both factors
        // are read before the call returns. With a factor of 0, C is not read.
        let status = unsafe {
            (api.matmul)(
                self.session.handle,
                operation.raw,
                one,
                b,
                weights.raw,
                a,
                tokens.raw,
                zero,
                d,
                out.raw,
                d,
                out.raw,
                algorithm,
                workspace,
                WORKSPACE,
                stream.raw(),
            )
        };
        api.check("cublasLtMatmul", status)
    }

    /// The algorithm that cuBLASLt expects to be the fastest. It is column-major: a row-major
    /// matrix is a transposed one there, so its left operand is B, its right operand A and its
    /// result N × M.
    fn plan(&self, Key { types, sizes: [m, n, k], alignments }: Key, operation: &Descriptor) -> cuda::Result<Plan> {
        let api = self.session.api;
        // SAFETY: cuBLASLt writes one handle.
        let layout = |of: c_int, rows: usize, cols: usize| {
            Descriptor::new(&api, "cublasLtMatrixLayoutCreate", api.layout_destroy, |raw| unsafe {
                (api.layout_create)(raw, of, rows as u64, cols as u64, rows as i64)
            })
        };
        let (weights, tokens, out) = (layout(types[0], k, n)?, layout(types[1], k, m)?, layout(types[2], n, m)?);
        // SAFETY: as above.
        let preference =
            Descriptor::new(&api, "cublasLtMatmulPreferenceCreate", api.preference_destroy, |raw| unsafe {
                (api.preference_create)(raw)
            })?;
        let call = "cublasLtMatmulPreferenceSetAttribute";
        preference.set(&api, call, api.preference_set, PREFERENCE_WORKSPACE, &(WORKSPACE as u64))?;
        // Otherwise partial sums may be rounded to bf16 before they are added.
        preference.set(&api, call, api.preference_set, PREFERENCE_REDUCTION, &REDUCTION_COMPUTE_TYPE)?;
        let [b, a, d] = alignments;
        for (attribute, alignment) in PREFERENCE_ALIGNMENTS.into_iter().zip([b, a, d, d]) {
            preference.set(&api, call, api.preference_set, attribute, &alignment)?;
        }
        let (mut found, mut count) = (Found::default(), 0);
        // SAFETY: all descriptors exist; cuBLASLt writes at most one result, as it is told, and one
        // number.
        let status = unsafe {
            (api.heuristic)(
                self.session.handle,
                operation.raw,
                weights.raw,
                tokens.raw,
                out.raw,
                out.raw,
                preference.raw,
                1,
                &mut found,
                &mut count,
            )
        };
        let call = "cublasLtMatmulAlgoGetHeuristic";
        api.check(call, status)?;
        if count < 1 {
            api.check(call, NOT_SUPPORTED)?;
        }
        api.check(call, found.state)?;
        Ok(Plan { weights, tokens, out, algorithm: found.algorithm })
    }
}

impl Key {
    fn new(types: [c_int; 3], sizes: [usize; 3], addresses: [u64; 3]) -> Self {
        Key { types, sizes, alignments: addresses.map(|address| 1 << address.trailing_zeros().min(8)) }
    }
}

/// The scale of a whole FP8 matrix, or an error if it has another kind.
fn tensor_scale<'a>(view: &Fp8View<'a>) -> Result<Slice<'a, f32>> {
    match (view.tile, view.scales) {
        (Tile::Tensor, Scales::F32(scale)) => {
            check_len("scale", 1, scale.len())?;
            Ok(scale)
        }
        _ => {
            let why = "cuBLASLt takes FP8 matrices with one 32-bit scale: quantize with one, or use `gemm::cuda`";
            Err(RuleError::Combination(why).into())
        }
    }
}

impl fmt::Debug for Cublas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cublas({}, {:?})", self.version(), self.session.device)
    }
}
