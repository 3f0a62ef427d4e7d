//! Kernels: compiled once, loaded once, launched often.

use super::compile::{Source, compile_cached, compiler_version};
use super::device::Device;
use super::error::{Error, Result, check};
use super::lock;
use super::stream::Stream;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUresult};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int, c_void};
use std::sync::{Arc, Mutex};
use std::{fmt, ptr};

/// The dynamic shared memory that every launch may use.
const SHARED_BY_DEFAULT: u32 = 48 * 1024;

/// A function on a GPU. It stays loaded for as long as the process lives.
#[derive(Clone, Copy)]
pub struct Kernel(&'static Loaded);

struct Loaded {
    device: Device,
    name: &'static str,
    function: CUfunction,
    /// The most dynamic shared memory that was asked for.
    shared: Mutex<u32>,
    /// How many blocks one multiprocessor runs, by their threads and their shared memory.
    occupancy: Mutex<BTreeMap<(u32, u32), u32>>,
}

// SAFETY: the function is a handle that the driver lets any thread use, several at once.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// The modules of one GPU by their text. An inner lock is held while its text is compiled: threads
/// that ask for the same text wait for one compilation, others do not wait.
type Modules = HashMap<String, Arc<Mutex<Option<Module>>>>;

/// The modules of each GPU, by its number. This lock is held for a look-up only.
static MODULES: Mutex<BTreeMap<usize, Modules>> = Mutex::new(BTreeMap::new());

struct Module {
    raw: CUmodule,
    functions: HashMap<String, Kernel>,
}

// SAFETY: the module is a handle that the driver lets any thread use; the mutex around it lets one
// at a time.
unsafe impl Send for Module {}

impl Device {
    /// The function `function` (declared `extern "C"`) of the kernel text `text`, which messages
    /// call `name`.
    ///
    /// Compiled and loaded if it is new to this process; a failure is not remembered. A look-up
    /// hashes the whole text, so keep the result where it is launched often.
    pub fn kernel(self, name: &'static str, function: &str, text: &str) -> Result<Kernel> {
        let entry = {
            let mut modules = lock(&MODULES);
            let modules = modules.entry(self.ordinal()).or_default();
            match modules.get(text) {
                Some(entry) => entry.clone(),
                None => modules.entry(text.to_string()).or_default().clone(),
            }
        };
        let mut entry = lock(&entry);
        let module = match &mut *entry {
            Some(module) => module,
            empty => empty.insert(Module::load(self, Source { name, text: text.to_string() })?),
        };
        if let Some(&kernel) = module.functions.get(function) {
            return Ok(kernel);
        }
        let kernel = module.function(self, name, function)?;
        module.functions.insert(function.to_string(), kernel);
        Ok(kernel)
    }
}

impl Module {
    fn load(device: Device, source: Source) -> Result<Module> {
        let driver = device.driver();
        let mut image = compile_cached(&device.0.cache, &source, device.capability(), driver)?;
        // PTX is text that must end in NUL. NVRTC's does; one more does no harm.
        image.push(0);
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current, the image is whole, and the driver copies it.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) };
        let compiler = compiler_version()?;
        let unknown = [CUresult::CUDA_ERROR_INVALID_IMAGE, CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU];
        if code == CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION || unknown.contains(&code) && compiler > driver {
            return Err(Error::OlderThanCompiler { driver, compiler });
        }
        check("cuModuleLoadData", code)?;
        Ok(Module { raw, functions: HashMap::new() })
    }

    fn function(&self, device: Device, name: &'static str, function: &str) -> Result<Kernel> {
        let missing = || Error::Compile { kernel: name.to_string(), log: format!("it has no function '{function}'") };
        let symbol = CString::new(function).map_err(|_| missing())?;
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends in NUL; the driver writes one handle.
        match unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, symbol.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
            code => check("cuModuleGetFunction", code)?,
        }
        let (shared, occupancy) = (Mutex::new(SHARED_BY_DEFAULT), Mutex::default());
        let loaded = Loaded { device, name, function: raw, shared, occupancy };
        Ok(Kernel(Box::leak(Box::new(loaded))))
    }
}

impl Kernel {
    /// Runs `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory each.
    /// Does not wait. A grid with a zero dimension is a no-op.
    ///
    /// # Safety
    ///
    /// `P` has the layout of the kernel's one parameter, every address in it is of memory on this
    /// GPU that the kernel may use as it does, and that memory stays allocated and is not accessed
    /// concurrently until the run has finished.
    pub unsafe fn launch<P: Copy>(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.launch_with(stream, (grid, block, shared), &mut [], params) }
    }

    /// [`Kernel::launch`] with programmatic dependent launch: the kernel may start before earlier
    /// work of the stream has finished. GPUs before Hopper do not have it, and
    /// [portable](Device::portable) kernels do not wait for earlier work; for both this is an
    /// ordinary launch.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::launch`]. In addition, unless it is portable, the kernel waits for earlier
    /// work (`griddepcontrol.wait`) before it writes memory, or reads any that may have been written
    /// by a kernel that no other work has waited for.
    pub(crate) unsafe fn launch_dependent<P: Copy>(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        params: &P,
    ) -> Result<()> {
        if self.0.device.capability().0 < 9 || self.0.device.portable() {
            // SAFETY: the caller's promise is more than is asked for.
            return unsafe { self.launch(stream, grid, block, shared, params) };
        }
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        // SAFETY: as above.
        unsafe { self.launch_with(stream, (grid, block, shared), std::slice::from_mut(&mut early), params) }
    }

    /// # Safety
    ///
    /// As for [`Kernel::launch`]; and the kernel can do what the attributes say.
    unsafe fn launch_with<P: Copy>(
        &self,
        stream: &Stream,
        (grid, block, shared): ([u32; 3], u32, u32),
        attributes: &mut [sys::CUlaunchAttribute],
        params: &P,
    ) -> Result<()> {
        let Loaded { device, name, function, .. } = *self.0;
        device.expect("the stream of a kernel", stream.device().ordinal())?;
        check_grid(name, grid)?;
        if grid.contains(&0) {
            return Ok(());
        }
        let _current = device.enter()?;
        self.allow_shared(shared)?;
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream.raw().cast(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut params: [*mut c_void; 1] = [ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: the driver copies the parameter and the attributes before it returns; the caller
        // vouches for layout and addresses.
        let code = unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), ptr::null_mut()) };
        check("cuLaunchKernelEx", code)
    }

    /// How many blocks of this size one multiprocessor runs at a time. The driver is asked once.
    pub fn max_blocks_per_sm(&self, block: u32, shared: u32) -> Result<u32> {
        if let Some(&blocks) = lock(&self.0.occupancy).get(&(block, shared)) {
            return Ok(blocks);
        }
        let _current = self.0.device.enter()?;
        self.allow_shared(shared)?;
        let (function, mut blocks): (_, c_int) = (self.0.function, 0);
        // SAFETY: the function is loaded; the driver writes one number.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, block as c_int, shared as usize)
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        lock(&self.0.occupancy).insert((block, shared), blocks as u32);
        Ok(blocks as u32)
    }

    /// Raises the limit of dynamic shared memory for this kernel. A context must be current.
    fn allow_shared(&self, shared: u32) -> Result<()> {
        if shared <= SHARED_BY_DEFAULT {
            return Ok(());
        }
        let mut allowed = lock(&self.0.shared);
        if shared > *allowed {
            let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded; a value that the GPU does not have is refused.
            let code = unsafe { sys::cuFuncSetAttribute(self.0.function, which, shared as c_int) };
            check("cuFuncSetAttribute (dynamic shared memory)", code)?;
            *allowed = shared;
        }
        Ok(())
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({}, {:?})", self.0.name, self.0.device)
    }
}

fn check_grid(kernel: &'static str, grid: [u32; 3]) -> Result<()> {
    const MOST: [u32; 3] = [i32::MAX as u32, 65535, 65535];
    let fits = grid.iter().zip(MOST).all(|(&blocks, most)| blocks <= most);
    if fits { Ok(()) } else { Err(Error::GridTooLarge { kernel, grid }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_may_be_long_but_not_high() {
        for grid in [[0, 0, 0], [2147483647, 65535, 65535]] {
            assert_eq!(check_grid("k", grid), Ok(()));
        }
        for grid in [[2147483648, 1, 1], [1, 65536, 1], [1, 1, 65536]] {
            assert_eq!(check_grid("k", grid), Err(Error::GridTooLarge { kernel: "k", grid }));
        }
    }
}
