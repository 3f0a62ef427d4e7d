//! cuBLASLt: bf16 products by NVIDIA's own library, to measure ours beside, and FP8 products on the tensor cores of Hopper and newer
//! GPUs. Optional: nothing else needs it.
//!
//! Its interface is declared here, a few functions of it, rather than taken from cudarc: several libraries can then be tried in turn
//! (one that is newer than the driver loads and does not start), and none that lacks a function is a panic.

use super::device::Device;
use super::environment::Environment;
use super::error::{Error, Result, Version};
use super::lock;
use super::memory::{Buffer, Plain, Slice, SliceMut};
use super::stream::Stream;
use crate::fp8::cuda::View as Fp8View;
use crate::input::check_len;
use half::bf16;
use libloading::Library;
use nvfp4_spec::fp8::{Format, Scales, Tile};
use nvfp4_spec::{Element, Error as RuleError, Precision, area};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::sync::Mutex;
use std::{fmt, ptr};

/// Bytes that a product may use meanwhile.
const WORKSPACE: usize = 32 << 20;

/// cuBLASLt on one GPU, with memory for its products: of one stream, since work of two at the same time would meet in it.
pub struct Cublas {
    plans: Mutex<HashMap<Key, Plan>>,
    /// Aᵀ·B, sums in binary32.
    operation: Descriptor,
    /// The same, both sides multiplied by numbers of the GPU's memory, which are set for each product while `plans` is locked.
    scaled: Descriptor,
    workspace: Buffer<u8>,
    session: Session,
}

/// What a plan depends on: the types of the right side, the left side and the outputs, M, N and K, and what the addresses are multiples
/// of.
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
    /// Loads the library and sets it up, or says why it cannot be used; [`Error::NoCublas`] where there is none.
    pub fn open(device: Device) -> Result<Cublas> {
        let mut reason = Error::NoCublas;
        for api in candidates().iter().filter_map(Api::load) {
            match Session::new(device, api) {
                Ok(session) => return Cublas::new(session),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn new(session: Session) -> Result<Cublas> {
        let api = session.api;
        let operation = || -> Result<Descriptor> {
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
    /// The first call of a shape chooses an algorithm and may load it, which a capture refuses: run a product once before capturing it.
    pub fn matmul_bf16(
        &self,
        stream: &Stream,
        a: Slice<'_, bf16>,
        b: Slice<'_, bf16>,
        (m, n, k): (usize, usize, usize),
        out: SliceMut<'_, bf16>,
    ) -> crate::Result<()> {
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

    /// `out = A·Bᵀ` of two FP8 matrices with a 32-bit scale each, which are applied to the sums. Does not wait; see
    /// [`Cublas::matmul_bf16`] for captures.
    ///
    /// **Not** within [`nvfp4_spec::gemm::bound`]: the FP8 tensor cores of Hopper keep about 14 bits of what they add, so that an output
    /// may be off by K·2⁻¹² of its products' magnitudes. [`gemm::cuda`](crate::gemm::cuda) is precise, and slow.
    ///
    /// The library takes K and N that are multiples of 16, addresses that are multiples of 16 bytes, and no two E5M2 matrices; it needs a
    /// GPU of compute capability 8.9 or newer.
    pub fn matmul_fp8<T: Element + Plain>(
        &self,
        stream: &Stream,
        a: &Fp8View<'_>,
        b: &Fp8View<'_>,
        out: SliceMut<'_, T>,
    ) -> crate::Result<()> {
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

    /// A product of checked operands: addresses of B, A and the outputs, and of both scales if they are scaled.
    fn run(&self, stream: &Stream, key: Key, addresses: [u64; 3], scales: Option<[u64; 2]>) -> Result<()> {
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
        // SAFETY: a context is current; the lengths were checked against the shape that the descriptors were made for, and all is memory
        // of this GPU, the scales too. Both factors are read before the call returns. With a factor of 0, C is not read.
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

    /// The algorithm that cuBLASLt expects to be the fastest. It counts in columns: what is row-major here is transposed there, so
    /// that its left side is B, its right side A and its result N × M.
    fn plan(&self, Key { types, sizes: [m, n, k], alignments }: Key, operation: &Descriptor) -> Result<Plan> {
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
        // Parts of a sum may otherwise be rounded to bf16 before they are added.
        preference.set(&api, call, api.preference_set, PREFERENCE_REDUCTION, &REDUCTION_COMPUTE_TYPE)?;
        let [b, a, d] = alignments;
        for (attribute, alignment) in PREFERENCE_ALIGNMENTS.into_iter().zip([b, a, d, d]) {
            preference.set(&api, call, api.preference_set, attribute, &alignment)?;
        }
        let (mut found, mut count) = (Found::default(), 0);
        // SAFETY: all descriptors exist; cuBLASLt writes at most one result, as it is told, and one number.
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
fn tensor_scale<'a>(view: &Fp8View<'a>) -> crate::Result<Slice<'a, f32>> {
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

/// An open library.
struct Session {
    device: Device,
    api: Api,
    handle: *mut c_void,
}

impl Session {
    fn new(device: Device, api: Api) -> Result<Session> {
        let _current = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: a context is current; cuBLASLt writes one handle.
        api.check("cublasLtCreate", unsafe { (api.create)(&mut handle) })?;
        Ok(Session { device, api, handle })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the handle is ours and destroyed once.
            unsafe { (self.api.destroy)(self.handle) };
        }
    }
}

/// A description of an operation, a matrix or a preference, destroyed when dropped.
struct Descriptor {
    raw: *mut c_void,
    destroy: Destroy,
}

impl Descriptor {
    /// What `create` writes, to be destroyed by `destroy`.
    fn new(
        api: &Api,
        call: &'static str,
        destroy: Destroy,
        create: impl FnOnce(*mut *mut c_void) -> c_int,
    ) -> Result<Self> {
        let mut raw = ptr::null_mut();
        api.check(call, create(&mut raw))?;
        Ok(Descriptor { raw, destroy })
    }

    fn set<T: Copy>(&self, api: &Api, call: &'static str, set: Set, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: the descriptor exists, and cuBLASLt copies so many bytes; it refuses a number that is not the attribute's.
        api.check(call, unsafe { set(self.raw, attribute, ptr::from_ref(value).cast(), size_of::<T>()) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

// Numbers of cublasLt.h and library_types.h, the same in all versions.
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const R_8F_E4M3: c_int = 28;
const R_8F_E5M2: c_int = 29;
const COMPUTE_32F: c_int = 68;
const OPERATION_TRANSA: c_int = 3;
const OPERATION_TRANSB: c_int = 4;
/// Of the library's left and right side.
const OPERATION_SCALES: [c_int; 2] = [17, 18];
const SET_OPERATION: &str = "cublasLtMatmulDescSetAttribute";
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;
const PREFERENCE_WORKSPACE: c_int = 1;
const PREFERENCE_REDUCTION: c_int = 3;
/// Of A, B, C and D.
const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
const REDUCTION_COMPUTE_TYPE: u32 = 2;
const NOT_SUPPORTED: c_int = 15;

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Default)]
#[repr(C)]
struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type Set = unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> c_int;
type Heuristic = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    c_int,
    *mut Found,
    *mut c_int,
) -> c_int;
type Matmul = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *const Algorithm,
    *mut c_void,
    usize,
    *mut c_void,
) -> c_int;

/// The functions of a loaded library.
#[derive(Clone, Copy)]
struct Api {
    create: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    destroy: Destroy,
    version: unsafe extern "C" fn() -> usize,
    status_text: unsafe extern "C" fn(c_int) -> *const c_char,
    operation_create: unsafe extern "C" fn(*mut *mut c_void, c_int, c_int) -> c_int,
    operation_destroy: Destroy,
    operation_set: Set,
    layout_create: unsafe extern "C" fn(*mut *mut c_void, c_int, u64, u64, i64) -> c_int,
    layout_destroy: Destroy,
    preference_create: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    preference_destroy: Destroy,
    preference_set: Set,
    heuristic: Heuristic,
    matmul: Matmul,
}

impl Api {
    /// The functions of a library that is loaded for as long as the process lives; `None` where it is not there or not whole.
    fn load(name: &OsString) -> Option<Api> {
        /// # Safety
        ///
        /// `T` is the type of the function of that name.
        unsafe fn function<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
            // SAFETY: the caller vouches for the type.
            unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
        }
        // SAFETY: cuBLASLt does nothing when loaded but set itself up. It is never unloaded.
        let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(name) }.ok()?));
        // SAFETY: these are the declarations of cublasLt.h, enumerations being as wide as `int`.
        unsafe {
            Some(Api {
                create: function(library, c"cublasLtCreate")?,
                destroy: function(library, c"cublasLtDestroy")?,
                version: function(library, c"cublasLtGetVersion")?,
                status_text: function(library, c"cublasLtGetStatusString")?,
                operation_create: function(library, c"cublasLtMatmulDescCreate")?,
                operation_destroy: function(library, c"cublasLtMatmulDescDestroy")?,
                operation_set: function(library, c"cublasLtMatmulDescSetAttribute")?,
                layout_create: function(library, c"cublasLtMatrixLayoutCreate")?,
                layout_destroy: function(library, c"cublasLtMatrixLayoutDestroy")?,
                preference_create: function(library, c"cublasLtMatmulPreferenceCreate")?,
                preference_destroy: function(library, c"cublasLtMatmulPreferenceDestroy")?,
                preference_set: function(library, c"cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: function(library, c"cublasLtMatmulAlgoGetHeuristic")?,
                matmul: function(library, c"cublasLtMatmul")?,
            })
        }
    }

    /// What a call returned, as a result.
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number.
        let text = unsafe { (self.status_text)(status) };
        let text = match text.is_null() {
            true => "unknown".to_string(),
            // SAFETY: cuBLASLt gives a static string that ends in NUL.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(Error::Driver { call, code: status as u32, text })
    }
}

/// What the library may be called: by its name where the dynamic loader finds it, else in a folder that the environment names.
fn candidates() -> Vec<OsString> {
    const NAMES: &[&str] = if cfg!(windows) {
        &["cublasLt64_13.dll", "cublasLt64_12.dll"]
    } else {
        &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]
    };
    let folders = Environment::read().libraries;
    let paths = folders.iter().flat_map(|folder| NAMES.iter().map(|name| folder.join(name)));
    // The loader would say the same of a path that does not exist, only later.
    let paths = paths.filter(|path| path.exists()).map(OsString::from);
    NAMES.iter().map(OsString::from).chain(paths).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_as_large_as_cublas_writes_it() {
        assert_eq!((size_of::<Found>(), size_of::<Algorithm>()), (96, 64));
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_one_is_none() {
        for name in ["no_such_library.so", "libc.so.6"] {
            assert!(Api::load(&name.into()).is_none(), "{name}");
        }
    }

    #[test]
    fn names_come_before_folders() {
        let candidates = candidates();
        let is_name = |name: &OsString| !name.to_string_lossy().contains(std::path::MAIN_SEPARATOR);
        let names = candidates.iter().take_while(|name| is_name(name)).count();
        assert!(names >= 2 && candidates[names..].iter().all(|path| !is_name(path)), "{candidates:?}");
    }
}
