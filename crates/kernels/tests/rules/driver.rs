//! `driver.cpp` built with the rules of the GPU, and calls through it.

use nvfp4_kernels::cuda::{FP8_RULES, RULES, constants};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Every operation rounds once. Undefined behaviour ends the process, including a float that does
/// not fit its integer.
const OPTIONS: [&str; 8] = [
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-Werror=overflow",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-fsanitize=undefined,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
];

/// The rules built by the host's compiler.
pub struct Driver(PathBuf);

impl Driver {
    /// The driver, built once per process, or why there is none. A text that does not compile is a
    /// failure.
    pub fn get() -> Result<&'static Driver, String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::build).as_ref().map_err(String::clone)
    }

    fn build() -> Result<Driver, String> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let own = folder.join(format!("rules-{}", std::process::id()));
        let (text, program) = (own.with_extension("cpp"), folder.join("rules"));
        let driver = include_str!("driver.cpp");
        std::fs::write(&text, [&constants(), RULES, FP8_RULES, driver].join("\n")).unwrap();
        let output = match Command::new("g++").args(OPTIONS).arg(&text).arg("-o").arg(&own).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err("there is no g++".to_string()),
            output => output.unwrap(),
        };
        std::fs::remove_file(&text).unwrap();
        assert!(output.status.success(), "g++: {}", String::from_utf8_lossy(&output.stderr));
        // Another process may be using the old one, which it keeps.
        std::fs::rename(&own, &program).unwrap();
        Ok(Driver(program))
    }

    /// Calls `function` with every record; the results follow each other.
    pub fn call(&self, function: &str, records: &[u32]) -> Vec<u32> {
        let bytes: Vec<u8> = records.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut child =
            Command::new(&self.0).arg(function).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // The driver reads everything before it writes. One that ended early says why below.
        let _ = child.stdin.take().unwrap().write_all(&bytes);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{function}: {}", output.status);
        output.stdout.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
    }

    /// Compares `function` with the rule of `spec` over all cases, of `N` words with a result of
    /// `M` words.
    pub fn check<const N: usize, const M: usize>(
        &self,
        function: &str,
        cases: &[[u32; N]],
        spec: impl Fn([u32; N]) -> [u32; M],
    ) {
        assert!(!cases.is_empty());
        let results = self.call(function, cases.as_flattened());
        assert_eq!(results.len(), M * cases.len(), "{function}");
        for (&case, got) in cases.iter().zip(results.as_chunks::<M>().0) {
            let expected = spec(case);
            assert!(*got == expected, "{function} of {case:x?}: {got:x?} instead of {expected:x?}");
        }
        println!("{function}: {} cases", cases.len());
    }
}
