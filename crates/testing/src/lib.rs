//! What the tests of this workspace share: this file has what a test does where the machine lacks
//! something that it needs, [`imports`] finds modules that import each other.
//!
//! `NVFP4_REQUIRE` lists what must be there, as in `NVFP4_REQUIRE=avx2,g++`: a test that misses one
//! of these fails. A test that misses anything else is skipped, says so, and writes a line to the
//! file that `NVFP4_SKIPPED` names, which `./test` shows at its end. No test passes because of what
//! it did not find, unless that line says so.

pub mod imports;

use std::env;
use std::fmt::{self, Display};
use std::fs::OpenOptions;
use std::io::Write;
use std::thread;

/// Something that a test needs and a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A CPU with AVX2, FMA and F16C.
    Avx2,
    /// A CPU with AVX-512 and VNNI.
    Avx512,
    /// A CPU with NEON: 64-bit ARM.
    Neon,
    /// An NVIDIA GPU that can be opened, and a compiler for its kernels.
    Gpu,
    /// NVIDIA's library of products, with FP8 units to run them.
    Cublas,
    /// The C++ compiler `g++`.
    Gxx,
    /// NVIDIA's run-time compiler.
    Nvrtc,
    /// The browser `chromium`.
    Browser,
    /// The right to mount a file system of one's own.
    Mount,
    /// The program `valgrind`; `./test` looks for it.
    Valgrind,
    /// torch, with which `./test --torch` tests the Python package.
    Torch,
    /// The libraries of others that `./test --all` compares the Python package with.
    Peers,
    /// What builds for 64-bit ARM and emulates it, for `./test --all`.
    Aarch64,
}

impl Need {
    /// Every need.
    pub const ALL: [Need; 13] = [
        Need::Avx2,
        Need::Avx512,
        Need::Neon,
        Need::Gpu,
        Need::Cublas,
        Need::Gxx,
        Need::Nvrtc,
        Need::Browser,
        Need::Mount,
        Need::Valgrind,
        Need::Torch,
        Need::Peers,
        Need::Aarch64,
    ];

    /// Its word in `NVFP4_REQUIRE`.
    pub fn word(self) -> &'static str {
        match self {
            Need::Avx2 => "avx2",
            Need::Avx512 => "avx512",
            Need::Neon => "neon",
            Need::Gpu => "gpu",
            Need::Cublas => "cublas",
            Need::Gxx => "g++",
            Need::Nvrtc => "nvrtc",
            Need::Browser => "browser",
            Need::Mount => "mount",
            Need::Valgrind => "valgrind",
            Need::Torch => "torch",
            Need::Peers => "peers",
            Need::Aarch64 => "aarch64",
        }
    }
}

impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// What `NVFP4_REQUIRE` lists. A word that is none of these is an error: it would require nothing.
pub fn required(list: &str) -> Result<Vec<Need>, String> {
    let words = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    words
        .map(|word| {
            Need::ALL.into_iter().find(|need| need.word() == word).ok_or_else(|| {
                let known = Need::ALL.map(Need::word).join(", ");
                format!("NVFP4_REQUIRE: there is no '{word}' to require; there are {known}")
            })
        })
        .collect()
}

/// To be called by a test that found `need` missing, for a reason, and then leaves out what needs
/// it.
///
/// # Panics
/// If `NVFP4_REQUIRE` lists the need, or a word that is unknown.
#[track_caller]
pub fn missing(need: Need, reason: impl Display) {
    let required =
        required(&env::var("NVFP4_REQUIRE").unwrap_or_default()).unwrap_or_else(|problem| panic!("{problem}"));
    assert!(!required.contains(&need), "NVFP4_REQUIRE lists {need}, which is missing: {reason}");
    let test = thread::current().name().unwrap_or("a thread without a name").to_string();
    // A line of its own, also where the reason has several, and written at once, since other tests
    // write too.
    let line = format!("{need}\t{test}\t{reason}").replace('\n', " ") + "\n";
    eprint!("skipped: {line}");
    if let Some(file) = env::var_os("NVFP4_SKIPPED") {
        let opened = OpenOptions::new().append(true).create(true).open(&file);
        opened
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("NVFP4_SKIPPED names a file that can be written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_nvfp4_require_is_known() {
        required(&env::var("NVFP4_REQUIRE").unwrap_or_default()).unwrap();
    }

    #[test]
    fn words_are_read() {
        assert_eq!(required(""), Ok(Vec::new()));
        assert_eq!(required("g++, gpu,"), Ok(vec![Need::Gxx, Need::Gpu]));
        for need in Need::ALL {
            assert_eq!(required(need.word()), Ok(vec![need]));
        }
        let unknown = required("avx2,gxx").unwrap_err();
        assert!(unknown.starts_with("NVFP4_REQUIRE: there is no 'gxx' to require; there are avx2, "), "{unknown}");
    }
}
