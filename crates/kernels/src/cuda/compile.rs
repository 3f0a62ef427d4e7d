//! Compiles kernel texts to machine code with NVRTC.
//!
//! No GPU is needed, and no header: kernel texts include nothing. Floating-point products and sums
//! are never fused (`--fmad=false`), so that a kernel rounds exactly where its text does.

use super::cache::{DiskCache, Key};
use super::environment::Environment;
use super::error::{Error, Result, Version};
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The oldest NVRTC that knows `sm_90a` and C++17.
const OLDEST: Version = Version { major: 12, minor: 0 };

/// The text of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// What messages call it.
    pub name: &'static str,
    /// CUDA C++ without includes.
    pub text: String,
}

/// Compiles for an architecture: machine code (a cubin) for `sm_90a` and its like, PTX for
/// `compute_90` and its like.
pub fn compile(source: &Source, architecture: &str) -> Result<Vec<u8>> {
    compiler_version()?;
    Program::new(source)?.compile(architecture, &options(architecture))
}

/// The result of [`compile`], from the cache if it is there.
pub(super) fn compile_cached(
    cache: &DiskCache,
    source: &Source,
    capability: (u32, u32),
    driver: Version,
) -> Result<Vec<u8>> {
    let version = compiler_version()?;
    let architecture = architecture(capability.0, capability.1, &supported_architectures()?);
    let options = options(&architecture).join(" ");
    let key = Key::new(&[&source.text, &options, &architecture, &version.to_string(), &driver.to_string()]);
    if let Some(image) = cache.load(key) {
        return Ok(image);
    }
    let image = compile(source, &architecture)?;
    cache.store(key, &image);
    Ok(image)
}

/// The architecture to compile for: the GPU has compute capability `major.minor`, NVRTC supports
/// the architectures `supported` (`[80, 90, 100]` and so on).
///
/// Chips with instructions of their own get the name that unlocks them (`sm_90a`), others the plain
/// one. A chip that NVRTC does not know gets PTX for the nearest older one, which the driver
/// translates; the portable bodies run there.
pub fn architecture(major: u32, minor: u32, supported: &[u32]) -> String {
    let number = major * 10 + minor;
    let nearest = supported.iter().copied().filter(|&s| s <= number).max();
    match (number, nearest) {
        (90 | 100 | 103 | 120 | 121, Some(n)) if n == number => format!("sm_{number}a"),
        (_, Some(n)) if n != number => format!("compute_{n}"),
        // With nothing older in the list, NVRTC itself says what is wrong.
        _ => format!("sm_{number}"),
    }
}

/// The architectures that this machine's NVRTC compiles for, as `10·major + minor`, ascending.
pub fn supported_architectures() -> Result<Vec<u32>> {
    compiler_version()?;
    let mut count: c_int = 0;
    // SAFETY: NVRTC is loaded, as its version was read; it writes one number.
    check("nvrtcGetNumSupportedArchs", unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) })?;
    let mut numbers = vec![0 as c_int; count.max(0) as usize];
    // SAFETY: NVRTC writes as many numbers as it has just counted.
    check("nvrtcGetSupportedArchs", unsafe { sys::nvrtcGetSupportedArchs(numbers.as_mut_ptr()) })?;
    Ok(numbers.into_iter().map(|n| n as u32).collect())
}

/// The version of this machine's NVRTC, or why there is none to use. Everything else in this file
/// asks here first: a call into a library that is not there would panic.
pub fn compiler_version() -> Result<Version> {
    static FOUND: OnceLock<Version> = OnceLock::new();
    static SEARCH: Mutex<()> = Mutex::new(());
    if let Some(&version) = FOUND.get() {
        return Ok(version);
    }
    // One thread searches at a time: a second one would find NVRTC loaded before its built-ins are.
    let _searching = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_loadable() && !load_from(&Environment::read()) {
        return Err(Error::NoCompiler);
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: NVRTC was found under a name that cudarc tries; it writes two numbers.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    let found = Version { major: major as u32, minor: minor as u32 };
    // Older ones lack functions that cudarc would panic for.
    if found < OLDEST {
        return Err(Error::OldCompiler { found, needed: OLDEST });
    }
    Ok(*FOUND.get_or_init(|| found))
}

/// Names of NVRTC, all among those that cudarc tries. cudarc's own probe is missing from builds
/// that link NVRTC.
const NAMES: &[&str] =
    if cfg!(windows) { &["nvrtc64_130_0.dll"] } else { &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"] };

/// Whether the dynamic loader finds NVRTC.
fn is_loadable() -> bool {
    // SAFETY: NVRTC's initialisers do nothing but set up NVRTC.
    NAMES.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

/// Loads NVRTC from a folder that the environment names. cudarc takes no path, but the loader
/// answers later requests for the bare name with the library that is already loaded under it. NVRTC
/// asks for its built-ins in the same way.
fn load_from(environment: &Environment) -> bool {
    let folder = environment.libraries.iter().find(|folder| NAMES.iter().any(|name| load(&folder.join(name))));
    for file in folder.and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten() {
        if file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            load(&file.path());
        }
    }
    folder.is_some() && is_loadable()
}

/// Loads a library for as long as the process lives.
fn load(path: &Path) -> bool {
    // SAFETY: the libraries of NVRTC do nothing when loaded but set themselves up.
    path.exists() && unsafe { libloading::Library::new(path) }.map(std::mem::forget).is_ok()
}

fn options(architecture: &str) -> [String; 3] {
    [format!("--gpu-architecture={architecture}"), "--fmad=false".into(), "--std=c++17".into()]
}

/// An NVRTC program, destroyed when dropped.
struct Program {
    raw: nvrtcProgram,
    name: &'static str,
}

impl Program {
    fn new(source: &Source) -> Result<Self> {
        let text = nul_terminated(source.name, &source.text)?;
        let name = nul_terminated(source.name, &format!("{}.cu", source.name))?;
        let (mut raw, none) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: NVRTC copies both strings, which end in NUL; there are no headers.
        let code = unsafe { sys::nvrtcCreateProgram(&mut raw, text.as_ptr(), name.as_ptr(), 0, none, none) };
        check("nvrtcCreateProgram", code)?;
        Ok(Program { raw, name: source.name })
    }

    fn compile(&self, architecture: &str, options: &[String]) -> Result<Vec<u8>> {
        let options = options.iter().map(|o| nul_terminated(self.name, o)).collect::<Result<Vec<CString>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program exists, and there are as many options, each ending in NUL, as are
        // announced.
        let code = unsafe { sys::nvrtcCompileProgram(self.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if code != nvrtcResult::NVRTC_SUCCESS {
            let log = self.log().filter(|log| !log.trim().is_empty()).unwrap_or_else(|| describe(code));
            return Err(Error::Compile { kernel: self.name.to_string(), log });
        }
        if architecture.starts_with("compute_") {
            self.output(["nvrtcGetPTXSize", "nvrtcGetPTX"], sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
        } else {
            self.output(["nvrtcGetCUBINSize", "nvrtcGetCUBIN"], sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
        }
    }

    fn log(&self) -> Option<String> {
        let names = ["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"];
        let bytes = self.output(names, sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string())
    }

    /// What a pair of NVRTC calls gives: its size, then its bytes.
    fn output(
        &self,
        names: [&'static str; 2],
        size: unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult,
        bytes: unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program exists, and NVRTC writes one number.
        check(names[0], unsafe { size(self.raw, &mut len) })?;
        let mut out = vec![0; len];
        // SAFETY: NVRTC writes the number of bytes that it has just announced.
        check(names[1], unsafe { bytes(self.raw, out.as_mut_ptr().cast()) })?;
        Ok(out)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program exists and nothing else refers to it.
        unsafe { sys::nvrtcDestroyProgram(&mut self.raw) };
    }
}

fn nul_terminated(kernel: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Compile { kernel: kernel.to_string(), log: "the text has a NUL".to_string() })
}

fn check(call: &'static str, code: nvrtcResult) -> Result<()> {
    match code {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        _ => Err(Error::Driver { call, code: code as u32, text: describe(code) }),
    }
}

fn describe(code: nvrtcResult) -> String {
    // SAFETY: the code came from NVRTC, which has a static string that ends in NUL for each.
    unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether NVRTC is here; says so if not, which is a failure where it is required, as in CI.
    fn compiler() -> bool {
        compiler_version().inspect_err(|reason| nvfp4_testing::missing(nvfp4_testing::Need::Nvrtc, reason)).is_ok()
    }

    fn source(text: &str) -> Source {
        Source { name: "test", text: text.to_string() }
    }

    #[test]
    fn chips_with_instructions_of_their_own_get_them() {
        let nvrtc_13 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];
        for (major, minor, expected) in [
            (8, 0, "sm_80"),
            (8, 6, "sm_86"),
            (8, 9, "sm_89"),
            (9, 0, "sm_90a"),
            (10, 0, "sm_100a"),
            (10, 3, "sm_103a"),
            (11, 0, "sm_110"),
            (12, 0, "sm_120a"),
            (12, 1, "sm_121a"),
            (10, 7, "compute_103"),
            (13, 0, "compute_121"),
        ] {
            assert_eq!(architecture(major, minor, &nvrtc_13), expected);
        }
        assert_eq!(architecture(10, 0, &[80, 89, 90]), "compute_90", "an NVRTC older than the chip");
        assert_eq!(architecture(8, 0, &[]), "sm_80");
    }

    #[test]
    fn a_kernel_compiles_for_every_generation() {
        if !compiler() {
            return;
        }
        let kernel = source("extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }");
        let supported = supported_architectures().unwrap();
        for (major, minor) in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (99, 9)] {
            let architecture = architecture(major, minor, &supported);
            let image = compile(&kernel, &architecture).unwrap();
            let kind: &[u8] = if architecture.starts_with("sm_") { b"\x7fELF" } else { b"//\n" };
            assert!(image.starts_with(kind), "{architecture}");
        }
    }

    #[test]
    fn sums_of_products_are_not_fused() {
        if !compiler() {
            return;
        }
        let text = "extern \"C\" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }";
        let ptx = String::from_utf8(compile(&source(text), "compute_80").unwrap()).unwrap();
        assert!(ptx.contains("mul.rn.f32") && ptx.contains("add.rn.f32") && !ptx.contains("fma"), "{ptx}");
    }

    #[test]
    fn a_mistake_is_told_in_the_words_of_the_compiler() {
        if !compiler() {
            return;
        }
        let Err(Error::Compile { kernel, log }) = compile(&source("__global__ void f() { nothing(); }"), "sm_80")
        else {
            panic!("this must not compile");
        };
        assert!(kernel == "test" && log.contains("test.cu(1): error: identifier \"nothing\" is undefined"), "{log}");
        for (text, architecture) in [("", "sm_1"), ("\0", "sm_80")] {
            assert!(matches!(compile(&source(text), architecture), Err(Error::Compile { .. })));
        }
    }

    #[test]
    fn threads_compile_at_once() {
        if !compiler() {
            return;
        }
        std::thread::scope(|scope| {
            for i in 0..4 {
                let text = format!("extern \"C\" __global__ void f(int* x) {{ x[0] = {i}; }}");
                scope.spawn(move || assert!(!compile(&source(&text), "sm_80").unwrap().is_empty()));
            }
        });
    }
}
