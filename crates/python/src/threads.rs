//! Work without the interpreter's lock, in whatever process it is asked for.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::process;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The process that loaded this module.
static LOADED_BY: OnceLock<u32> = OnceLock::new();

/// The threads of a process that was forked from it.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// Remembers which process loads the module.
pub fn remember() {
    LOADED_BY.get_or_init(process::id);
}

/// Runs `work` while other threads of Python go on.
///
/// A forked process has none of its parent's threads, so that work given to them would wait for
/// ever: it gets threads of its own.
pub fn run<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    match is_forked() {
        false => Ok(py.detach(work)),
        true => {
            let pool = pool()?;
            Ok(py.detach(|| pool.install(work)))
        }
    }
}

/// Whether this process was forked after the module was loaded.
pub fn is_forked() -> bool {
    LOADED_BY.get().is_some_and(|&id| id != process::id())
}

fn pool() -> PyResult<Arc<ThreadPool>> {
    let mut forked = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    match &*forked {
        Some((id, pool)) if *id == process::id() => Ok(Arc::clone(pool)),
        _ => {
            let pool = ThreadPoolBuilder::new().build().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            let pool = Arc::new(pool);
            if let Some((_, parents)) = forked.replace((process::id(), Arc::clone(&pool))) {
                std::mem::forget(parents); // its threads are not here to be told to end
            }
            Ok(pool)
        }
    }
}
