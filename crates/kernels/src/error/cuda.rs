//! What can go wrong on a GPU, and what to change.

use std::fmt;

/// The result of a call to a GPU.
pub type Result<T> = std::result::Result<T, Error>;

/// A version of the driver's interface or of NVRTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u32,
    /// After the point.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why a call to a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not on this machine.
    NoDriver,
    /// The driver sees no GPU.
    NoDevice,
    /// There is no GPU of that number.
    Ordinal {
        /// The number asked for.
        asked: usize,
        /// How many GPUs there are.
        count: usize,
    },
    /// The driver is older than this build.
    OldDriver {
        /// The CUDA version that the driver supports.
        found: Version,
        /// The one that is needed.
        needed: Version,
    },
    /// The driver is older than NVRTC, and cannot load what that compiles.
    OlderThanCompiler {
        /// The CUDA version that the driver supports.
        driver: Version,
        /// NVRTC's.
        compiler: Version,
    },
    /// The GPU lacks instructions that every kernel here may use.
    OldDevice {
        /// Its name.
        name: String,
        /// Its compute capability, before the point.
        major: u32,
        /// Its compute capability, after the point.
        minor: u32,
    },
    /// NVRTC is not on this machine.
    NoCompiler,
    /// NVRTC is older than this build.
    OldCompiler {
        /// Its version.
        found: Version,
        /// The one that is needed.
        needed: Version,
    },
    /// cuBLASLt is not on this machine.
    NoCublas,
    /// NVRTC refused a kernel.
    Compile {
        /// Which kernel.
        kernel: String,
        /// What NVRTC said.
        log: String,
    },
    /// The GPU has no room.
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
    },
    /// Another library gave no memory.
    Allocator {
        /// How much was asked for.
        bytes: usize,
        /// What it said.
        reason: String,
    },
    /// Memory was requested for one stream from an allocator that serves another.
    OtherStream,
    /// Memory or a stream belongs to another GPU.
    WrongDevice {
        /// What it is.
        what: &'static str,
        /// The GPU that the operation runs on.
        expected: usize,
        /// The GPU it belongs to.
        got: usize,
    },
    /// An address that is not one of GPU memory.
    NotDeviceMemory {
        /// What it was given for.
        what: &'static str,
    },
    /// An address that a kernel cannot read from in whole vectors.
    Misaligned {
        /// What it was given for.
        what: &'static str,
        /// The address.
        address: u64,
        /// What it must be a multiple of.
        need: usize,
    },
    /// More blocks than one launch may have.
    GridTooLarge {
        /// Which kernel.
        kernel: &'static str,
        /// The blocks in x, y and z.
        grid: [u32; 3],
    },
    /// A matrix with more blocks of 16 elements than kernels count.
    TooManyBlocks {
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// Prepared weights in a product with an operand that tensor cores do not take.
    Prepared,
    /// A product that cannot be computed in the way that was asked for.
    NotThisWay,
    /// Anything else that the driver, NVRTC or cuBLASLt answers.
    Driver {
        /// The call that failed.
        call: &'static str,
        /// What it returned.
        code: u32,
        /// What that means.
        text: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoDriver => f.write_str(
                "the CUDA driver library (libcuda) was not found: install the NVIDIA driver, \
                 or in a container start it with access to the GPU",
            ),
            Error::NoDevice => f.write_str(
                "the CUDA driver sees no GPU: check `nvidia-smi` and that CUDA_VISIBLE_DEVICES does not \
                 hide it",
            ),
            Error::Ordinal { asked, count } => {
                write!(f, "GPU {asked} does not exist: this machine has {count}, from 0")
            }
            Error::OldDriver { found, needed } => write!(
                f,
                "the NVIDIA driver supports CUDA {found} and CUDA {needed} or newer is needed: update \
                 the driver (another NVRTC does not help)"
            ),
            Error::OlderThanCompiler { driver, compiler } => write!(
                f,
                "the NVIDIA driver supports CUDA {driver} and cannot load what the CUDA run-time \
                 compiler (libnvrtc) {compiler} makes: install an NVRTC that is no newer than the driver \
                 (from PyPI, for a driver of CUDA 12: `nvidia-cuda-nvrtc-cu12`), or update the driver"
            ),
            Error::OldDevice { name, major, minor } => {
                write!(f, "{name} has compute capability {major}.{minor}: 8.0 (Ampere) or newer is needed")
            }
            Error::NoCompiler => f.write_str(
                "the CUDA run-time compiler (libnvrtc) was not found: install the CUDA toolkit, or run \
                 `pip install nvidia-cuda-nvrtc` (`nvidia-cuda-nvrtc-cu12` for a driver of CUDA 12) in a \
                 virtual environment, which is searched while it is active, or add the folder of \
                 libnvrtc.so to LD_LIBRARY_PATH",
            ),
            Error::OldCompiler { found, needed } => write!(
                f,
                "the CUDA run-time compiler (libnvrtc) found is {found} and {needed} or newer is \
                 needed: install a newer one and put its folder first in LD_LIBRARY_PATH"
            ),
            Error::NoCublas => f.write_str(
                "cuBLASLt (libcublasLt) was not found: install the CUDA toolkit, or run \
                 `pip install nvidia-cublas` (`nvidia-cublas-cu12` for a driver of CUDA 12) in a virtual \
                 environment, which is searched while it is active, or add the folder of \
                 libcublasLt.so to LD_LIBRARY_PATH",
            ),
            Error::Compile { kernel, log } => write!(f, "NVRTC cannot compile the kernel '{kernel}':\n{}", log.trim()),
            Error::OutOfMemory { bytes } => {
                write!(f, "the GPU has no {bytes} bytes of free memory: free some, or use smaller matrices")
            }
            Error::Allocator { bytes, reason } => {
                write!(f, "the allocator did not provide {bytes} bytes of GPU memory: {reason}")
            }
            Error::OtherStream => f.write_str(
                "another library's allocator serves one stream and was asked for memory for another: \
                 use the same stream for both",
            ),
            Error::WrongDevice { what, expected, got } => {
                write!(f, "{what}: expected GPU {expected}, got GPU {got}: move it there first")
            }
            Error::NotDeviceMemory { what } => {
                write!(f, "{what}: expected the address of GPU memory: copy it to the GPU first")
            }
            Error::Misaligned { what, address, need } => {
                write!(f, "{what}: expected an address that is a multiple of {need}, got {address:#x}")
            }
            Error::GridTooLarge { kernel, grid: [x, y, z] } => write!(
                f,
                "the kernel '{kernel}' cannot run {x} × {y} × {z} blocks (at most 2147483647 × 65535 × 65535): \
                 split the matrix"
            ),
            Error::TooManyBlocks { rows, cols } => write!(
                f,
                "a matrix of {rows} × {cols} elements is too large for one call on a GPU, which takes \
                 fewer than 2³¹ blocks of 16 per direction: split the matrix"
            ),
            Error::Prepared => write!(
                f,
                "prepared weights: expected NVFP4, bf16 or f16 with at least one column on the left, \
                 got f32, FP8 or no columns: convert the left operand, or pass the weights unprepared"
            ),
            Error::NotThisWay => f.write_str(
                "this product cannot be computed in the way that was asked for, on this GPU and of these \
                 operands: let the library choose one",
            ),
            Error::Driver { call, code, text } => write!(f, "{call} failed with code {code}: {text}"),
        }
    }
}

impl std::error::Error for Error {}
