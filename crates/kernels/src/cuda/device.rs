//! GPUs.

use super::cache::DiskCache;
use super::environment::Environment;
use super::error::{Error, Result, Version, check};
use super::lock;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::{fmt, ptr};

/// The oldest driver whose interface this build can call.
const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// A GPU, opened once per process: every copy of this handle, and every further [`Device::open`],
/// is the same one.
///
/// It holds the GPU's primary context, the one that PyTorch and candle use too, and the kernels
/// loaded into it, until the process ends: the memory is leaked on purpose, since a context that
/// others share cannot be torn down in time.
#[derive(Clone, Copy)]
pub struct Device(pub(super) &'static Inner);

pub(super) struct Inner {
    pub ordinal: usize,
    context: CUcontext,
    properties: Properties,
    pub driver: Version,
    pub cache: DiskCache,
    portable: bool,
}

// SAFETY: the context is a handle that the driver lets any thread use; the rest is Send and Sync by
// itself.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its compute capability: 9 and 0 for Hopper.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Bytes of second-level cache.
    pub l2_cache: usize,
    /// The most bytes of shared memory that a block may have.
    pub shared_memory: u32,
    /// Whether it reads pageable host memory directly, as Grace Hopper does: a copy from there may
    /// then return before the memory is read.
    pub reads_host_memory: bool,
}

impl Device {
    /// Opens GPU `ordinal`, or says why it cannot be used.
    pub fn open(ordinal: usize) -> Result<Device> {
        static OPEN: Mutex<BTreeMap<usize, &'static Inner>> = Mutex::new(BTreeMap::new());
        let mut open = lock(&OPEN);
        if let Some(inner) = open.get(&ordinal) {
            return Ok(Device(inner));
        }
        let properties = Properties::read(ordinal)?;
        properties.check()?;
        let mut context = ptr::null_mut();
        let device = handle(ordinal)?;
        // SAFETY: the device exists; the driver writes one handle.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        let environment = Environment::read();
        let inner = Inner {
            ordinal,
            context,
            properties,
            driver: driver_version()?,
            cache: DiskCache::new(environment.cache),
            portable: environment.portable,
        };
        Ok(Device(open.entry(ordinal).or_insert(Box::leak(Box::new(inner)))))
    }

    /// How many GPUs there are; none is [`Error::NoDevice`].
    pub fn count() -> Result<usize> {
        driver_version()?;
        let mut count: c_int = 0;
        // SAFETY: the driver is initialised; it writes one number.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        if count <= 0 { Err(Error::NoDevice) } else { Ok(count as usize) }
    }

    /// Its number.
    pub fn ordinal(self) -> usize {
        self.0.ordinal
    }

    /// What it is.
    pub fn properties(self) -> &'static Properties {
        &self.0.properties
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        &self.0.properties.name
    }

    /// Its compute capability.
    pub fn capability(self) -> (u32, u32) {
        self.0.properties.capability
    }

    /// Its streaming multiprocessors.
    pub fn multiprocessors(self) -> u32 {
        self.0.properties.multiprocessors
    }

    /// The CUDA version that its driver supports.
    pub fn driver(self) -> Version {
        self.0.driver
    }

    /// Whether its kernels avoid the chip's conversion instructions; see [`Environment::portable`].
    pub fn portable(self) -> bool {
        self.0.portable
    }

    /// The folder in which compiled kernels, and what else was found out about it, are kept.
    pub(crate) fn cache_folder(self) -> Option<&'static Path> {
        self.0.cache.folder()
    }

    /// Bytes of free memory and of all memory.
    pub fn memory_info(self) -> Result<(usize, usize)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the driver writes two numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Waits for all of this GPU's work, of every stream.
    pub fn synchronize(self) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes this GPU the calling thread's current one and leaves it so. Calls of this crate do not
    /// need that; afterwards they need not switch contexts.
    pub fn make_current(self) -> Result<()> {
        // SAFETY: the context is retained for as long as the process lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Makes this GPU current until the guard is dropped.
    pub(crate) fn enter(self) -> Result<Current> {
        let mut previous = ptr::null_mut();
        // SAFETY: a device is open, so the driver is initialised; it writes one handle.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut previous) })?;
        if previous == self.0.context {
            return Ok(Current { restore: None });
        }
        self.make_current()?;
        Ok(Current { restore: Some(previous) })
    }

    /// An error unless `other`, which `what` belongs to, is this GPU.
    pub(crate) fn expect(self, what: &'static str, other: usize) -> Result<()> {
        if other == self.ordinal() {
            return Ok(());
        }
        Err(Error::WrongDevice { what, expected: self.ordinal(), got: other })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.ordinal == other.0.ordinal
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.ordinal.hash(state);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.0.ordinal, self.0.properties.name)
    }
}

/// Restores the thread's current context.
pub(crate) struct Current {
    restore: Option<CUcontext>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(previous) = self.restore {
            // SAFETY: this context, or none, was current when the guard was made.
            unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

impl Properties {
    /// The properties of GPU `ordinal`, also of one that cannot be opened.
    pub fn read(ordinal: usize) -> Result<Properties> {
        let device = handle(ordinal)?;
        let mut name = [0 as c_char; 256];
        // SAFETY: the device exists; the driver writes no more than it is told there is room for,
        // and ends it with NUL.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device) })?;
        // SAFETY: the last byte was not the driver's to write, so a NUL is there.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory = 0;
        // SAFETY: the device exists; the driver writes one number.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) })?;
        let attribute = |which| {
            let mut value: c_int = 0;
            // SAFETY: the device exists; the driver writes one number.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
            Ok(value as u32)
        };
        Ok(Properties {
            ordinal,
            name,
            capability: (
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory,
            l2_cache: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            shared_memory: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            reads_host_memory: attribute(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            )? != 0,
        })
    }

    /// An error if the GPU is too old.
    pub fn check(&self) -> Result<()> {
        let (major, minor) = self.capability;
        if major >= 8 { Ok(()) } else { Err(Error::OldDevice { name: self.name.clone(), major, minor }) }
    }
}

/// The driver's handle of a GPU.
fn handle(ordinal: usize) -> Result<CUdevice> {
    let count = Device::count()?;
    if ordinal >= count {
        return Err(Error::Ordinal { asked: ordinal, count });
    }
    let mut device = 0;
    // SAFETY: the driver is initialised; it writes one handle.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

/// The CUDA version that the driver supports, once it is loaded and initialised. Everything else
/// asks here first: a call into a library that is not there would panic.
pub(super) fn driver_version() -> Result<Version> {
    static FOUND: OnceLock<Version> = OnceLock::new();
    if let Some(&version) = FOUND.get() {
        return Ok(version);
    }
    // Names that cudarc tries too. Its own probe is missing from builds that link the driver.
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };
    // SAFETY: the driver's initialisers do nothing but set up the driver.
    if !names.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok()) {
        return Err(Error::NoDriver);
    }
    // SAFETY: the driver is there; this may be called any number of times.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut number: c_int = 0;
    // SAFETY: the driver writes one number.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut number) })?;
    let number = number as u32;
    let found = Version { major: number / 1000, minor: number % 1000 / 10 };
    // Older ones lack functions that cudarc would panic for.
    if found < OLDEST_DRIVER {
        return Err(Error::OldDriver { found, needed: OLDEST_DRIVER });
    }
    Ok(*FOUND.get_or_init(|| found))
}
