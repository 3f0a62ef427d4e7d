//! What goes wrong, as Python's exceptions, which name the arguments of this package.

use nvfp4::{Error, format};
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// An error of the library as an exception: `OSError` for files, `RuntimeError` for the machine,
/// `ValueError` for what was asked.
pub trait Raised {
    /// The exception.
    fn raised(self) -> PyErr;
}

impl Raised for nvfp4_files::Error {
    fn raised(self) -> PyErr {
        let text = self.to_string();
        match &self {
            nvfp4_files::Error::Io { source, .. } => match source.raw_os_error() {
                Some(code) => PyOSError::new_err((code, text)),
                None => PyOSError::new_err(text),
            },
            _ => PyValueError::new_err(text),
        }
    }
}

impl Raised for Error {
    fn raised(self) -> PyErr {
        match self {
            Error::File(error) => error.raised(),
            Error::Exhausted => PyRuntimeError::new_err(self.to_string()),
            #[cfg(feature = "cuda")]
            Error::Cuda(_) => PyRuntimeError::new_err(self.to_string()),
            Error::NoRandomness => {
                PyValueError::new_err("stochastic rounding needs `seed` (and `offset`), or a `generator`")
            }
            Error::UnusedRandomness => PyValueError::new_err(
                "random numbers were given, but rounding is 'nearest'; use 'stochastic' or drop them",
            ),
            Error::Format(error) => error.raised(),
            _ => PyValueError::new_err(self.to_string()),
        }
    }
}

impl Raised for format::Error {
    fn raised(self) -> PyErr {
        match self {
            format::Error::TransformWithoutColumn => PyValueError::new_err(
                "the Hadamard transform acts on the column direction, which is not asked for; \
                 use directions='column' or 'both', or transform=None",
            ),
            _ => PyValueError::new_err(self.to_string()),
        }
    }
}

impl Raised for nvfp4_recipe::Error {
    fn raised(self) -> PyErr {
        match self {
            nvfp4_recipe::Error::Tensor(error) => error.raised(),
            nvfp4_recipe::Error::File(error) => error.raised(),
            nvfp4_recipe::Error::Collective(_) => PyRuntimeError::new_err(self.to_string()),
            _ => PyValueError::new_err(self.to_string()),
        }
    }
}

impl Raised for nvfp4_checkpoint::Error {
    fn raised(self) -> PyErr {
        match self {
            nvfp4_checkpoint::Error::Tensor(error) => error.raised(),
            nvfp4_checkpoint::Error::File(error) => error.raised(),
            nvfp4_checkpoint::Error::Interrupted => {
                PyKeyboardInterrupt::new_err("interrupted; the same call with existing='resume' continues")
            }
            _ => PyValueError::new_err(match argument(&self) {
                Some(argument) => format!("{self} [{argument}]"),
                None => self.to_string(),
            }),
        }
    }
}

/// The argument of `convert` that helps.
fn argument(error: &nvfp4_checkpoint::Error) -> Option<String> {
    use nvfp4_checkpoint::{Error, Setting};
    let text = match error {
        Error::WeightNotFinite { module, .. } => return Some(format!("skip=['{module}']")),
        Error::TargetExists { .. } => "existing='replace'",
        Error::Unfinished { .. } => "existing='resume' or existing='replace'",
        Error::OtherRequest { .. } | Error::DamagedJournal { .. } | Error::SourceChanged { .. } => "existing='replace'",
        Error::NotReadBack { error } if error.is_of_the_system() => "existing='resume'",
        Error::NotReadBack { .. } => "existing='replace'",
        Error::UnclearDialect { .. } => "from_='modelopt' or from_='comfyui'",
        Error::Setting { setting: Setting::Architectures, .. } => "any_architecture=True",
        Error::Setting { setting: Setting::Acts, .. } => "acts=",
        Error::Setting { setting: Setting::Kv, .. } => "kv='none'",
        Error::Setting { setting: Setting::Skip, .. } => "skip=",
        Error::Setting { setting: Setting::Fuse, .. } => "fuse='off'",
        Error::Setting { setting: Setting::Differing, .. } => "fix_scales=False",
        Error::Setting { setting: Setting::Profile, .. } => "profile=, scale=",
        Error::Setting { setting: Setting::Statistics, .. } => "stats=, scale=, round=",
        Error::Setting { setting: Setting::Target, .. } => "to='modelopt'",
        _ => return None,
    };
    Some(text.to_string())
}

/// The library's results as Python's.
pub trait OrRaise<T> {
    /// The value, or the exception to raise.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: Raised> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(E::raised)
    }
}
