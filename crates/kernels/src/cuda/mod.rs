//! The base of the GPU implementations: devices, memory, streams, and kernels compiled at run time.
//!
//! Nothing here knows an operation, and nothing knows a number format except the rules
//! (`rules.cuh`, `fp8_rules.cuh`, and `text.rs`, which prints their constants). The driver and
//! NVRTC are loaded when first needed. Where one is missing, every call returns an [`Error`] that
//! says so; the crate builds and runs without them.
//!
//! Read in this order: [`Device`], [`Stream`], [`Buffer`] and its [`Slice`]s, [`Kernel`].
//!
//! Each call makes its device's context current and restores the calling thread's own, so other
//! frameworks in the same process are not affected.

mod cache;
mod captured;
mod compile;
mod counting;
mod device;
mod doctor;
mod environment;
mod error;
mod groups;
mod input;
mod kernel;
mod memory;
mod pool;
mod recycled;
pub mod shared;
mod stream;
mod tensor_map;
pub(crate) mod text;
mod timing;

pub(crate) use cache::{fingerprint, write as write_whole};
pub use compile::{Source, architecture, compile, compiler_version, supported_architectures};
pub(crate) use counting::{countable, divisor};
pub use device::{Device, Properties};
pub use doctor::{Cache, Report, doctor};
pub use environment::Environment;
pub use error::{Error, Result, Version};
pub use groups::{Along, GROUP_ROWS, GROUP_SCALES, Groups, Matrix};
pub(crate) use groups::{GROUPS, GroupsParams, sources as groups_sources};
pub(crate) use input::Uploaded;
pub use input::{Input, Values};
pub use kernel::Kernel;
pub use memory::{Buffer, Place, Plain, Slice, SliceMut};
pub use pool::{Allocator, Memory, Pool};
pub use recycled::Recycled;
pub use stream::{Event, Graph, Stream};
pub(crate) use tensor_map::{MapValues, tensor_map};
pub(crate) use text::entry;
pub use text::{FP8_RULES, RULES, constants};
pub use timing::time_interleaved;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex even if it is poisoned: each insertion is one call, so a panic elsewhere leaves
/// these maps whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
