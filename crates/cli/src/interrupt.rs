//! Ctrl-C and SIGTERM, which long commands notice between two pieces of work.

use crate::Host;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);

/// The last signal.
static SIGNAL: AtomicUsize = AtomicUsize::new(0);

/// Set by Ctrl-C, and in a program of its own by SIGTERM. A second one ends a program at once,
/// which loses no more than a kill does. Whoever watches for them besides goes on to do so.
pub fn interrupts(host: Host) -> Result<&'static AtomicBool> {
    static WATCHED: Mutex<bool> = Mutex::new(false);
    STOP.store(false, Ordering::Relaxed);
    SIGNAL.store(0, Ordering::Relaxed);
    let mut watched = WATCHED.lock().expect("no holder panics");
    if !*watched {
        watch(host).context("cannot watch for Ctrl-C")?;
        *watched = true;
    }
    Ok(&STOP)
}

fn watch(host: Host) -> io::Result<()> {
    // To watch for SIGTERM is to survive it, which is not for a guest to decide; nor is the end of
    // its host.
    let signals: &[i32] = match host {
        Host::Program => &[SIGINT, SIGTERM],
        Host::Library => &[SIGINT],
    };
    for &signal in signals {
        if host == Host::Program {
            flag::register_conditional_shutdown(signal, 128 + signal, &STOP)?;
        }
        flag::register_usize(signal, &SIGNAL, signal as usize)?;
        flag::register(signal, &STOP)?;
    }
    Ok(())
}

/// A file that may grow no further (`ulimit -f`) is an error of the write that says its name, not a
/// signal that ends the program.
pub fn survive_full_files() {
    #[cfg(unix)]
    {
        // A program that cannot is ended by the signal, as it was before.
        static CAME: AtomicBool = AtomicBool::new(false);
        let _ = flag::register(signal_hook::consts::SIGXFSZ, &CAME);
    }
}

/// The exit status of a command that was interrupted, as shells give it: 130 for Ctrl-C, 143 for
/// SIGTERM.
pub fn status() -> u8 {
    let signal = match SIGNAL.load(Ordering::Relaxed) {
        0 => SIGINT as usize,
        signal => signal,
    };
    128 + signal as u8
}
