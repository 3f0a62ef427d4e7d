//! Files: written so that they are whole or not there, and read without trust.
//!
//! [`durable`] writes files and folders that survive a stop of the machine, [`regular`] opens files
//! that strangers provide, [`positioned`] reads and writes at offsets, and [`container`] is the form
//! of this project's own files.

#![forbid(unsafe_code)]

pub mod container;
pub mod durable;
mod error;
mod fingerprint;
mod json;
pub mod positioned;
pub mod regular;

pub use error::{Error, Result};
pub use fingerprint::fingerprint;
pub use json::unique_keys;
