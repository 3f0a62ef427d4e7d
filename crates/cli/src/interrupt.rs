//! Ctrl-C, which long commands notice between two pieces of work.

use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Set by Ctrl-C. A second Ctrl-C ends the program at once, which loses no more than a kill does.
pub fn interrupts() -> Result<&'static AtomicBool> {
    static STOP: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .context("cannot watch for Ctrl-C")?;
    Ok(&STOP)
}
