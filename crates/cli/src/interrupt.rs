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

/// Set by Ctrl-C, and in a process of our own by SIGTERM. A second signal ends such a process at
/// once, which loses no more than a kill does. Other handlers of these signals stay installed.
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
    // Who handles SIGTERM survives it. A library does not decide that for its host, nor when its
    // host ends.
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

/// Makes a write beyond the limit on file sizes (`ulimit -f`) an error that names the file, not a
/// signal that ends the program.
pub fn survive_full_files() {
    #[cfg(unix)]
    {
        // If this fails, the signal ends the program, as it did before.
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
