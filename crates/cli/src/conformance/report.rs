//! What differs, and how it is told: one line per kind and mode, then a total.

use half::{bf16, f16};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// The places where a case differs from what was expected, one entry per tensor.
#[derive(Default)]
pub struct Differences {
    found: Vec<String>,
}

impl Differences {
    /// Compares a tensor element by element, by bits.
    pub fn compare<T: Bits>(&mut self, what: &str, expected: &[T], got: &[T]) {
        if expected.len() != got.len() {
            self.found.push(format!("{what}: expected {} elements, got {}", expected.len(), got.len()));
            return;
        }
        let mut differing = (0..got.len()).filter(|&i| !expected[i].same(&got[i]));
        if let Some(i) = differing.next() {
            let more = match differing.count() {
                0 => String::new(),
                n => format!(" ({n} more)"),
            };
            self.found.push(format!("{what}[{i}]: expected {}, got {}{more}", expected[i].show(), got[i].show()));
        }
    }
}

/// Values compared by their bits; every NaN equals every NaN.
pub trait Bits {
    fn same(&self, other: &Self) -> bool;
    fn show(&self) -> String;
}

impl Bits for u8 {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
    fn show(&self) -> String {
        format!("{self:#04x}")
    }
}

impl Bits for u32 {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
    fn show(&self) -> String {
        format!("{self:#010x}")
    }
}

impl Bits for f32 {
    fn same(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
    }
    fn show(&self) -> String {
        format!("{self:e} ({:#010x})", self.to_bits())
    }
}

impl Bits for bf16 {
    fn same(&self, other: &Self) -> bool {
        self.to_f32().same(&other.to_f32())
    }
    fn show(&self) -> String {
        format!("{self:e} ({:#06x})", self.to_bits())
    }
}

impl Bits for f16 {
    fn same(&self, other: &Self) -> bool {
        self.to_f32().same(&other.to_f32())
    }
    fn show(&self) -> String {
        format!("{self:e} ({:#06x})", self.to_bits())
    }
}

/// Everything that was found, by kind and mode.
#[derive(Default)]
pub struct Report {
    modes: BTreeMap<String, Count>,
    problems: Vec<String>,
    errors: usize,
}

#[derive(Default)]
struct Count {
    cases: usize,
    mismatches: usize,
}

impl Report {
    pub fn new() -> Self {
        Self::default()
    }

    /// A case that ran.
    pub fn add(&mut self, file: &str, label: String, differences: Differences) {
        let count = self.modes.entry(label).or_default();
        count.cases += 1;
        count.mismatches += usize::from(!differences.found.is_empty());
        self.problems.extend(differences.found.iter().map(|d| format!("mismatch: {file}: {d}")));
    }

    /// A case that could not run.
    pub fn fail(&mut self, file: &str, error: &anyhow::Error) {
        self.errors += 1;
        self.problems.push(format!("error: {file}: {error:#}"));
    }

    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }

    /// Cases and mismatches of all modes.
    fn total(&self) -> (usize, usize) {
        self.modes.values().fold((0, 0), |(c, m), count| (c + count.cases, m + count.mismatches))
    }

    pub fn to_json(&self) -> Value {
        let mode = |(mode, count): (&String, &Count)| json!({ "mode": mode, "cases": count.cases, "mismatches": count.mismatches });
        let (cases, mismatches) = self.total();
        json!({
            "modes": self.modes.iter().map(mode).collect::<Vec<Value>>(), "cases": cases, "mismatches": mismatches,
            "errors": self.errors, "problems": self.problems
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
        let counts = |cases, mismatches| {
            format!("{}, {}", plural(cases, "case", "cases"), plural(mismatches, "mismatch", "mismatches"))
        };
        for (label, count) in &self.modes {
            writeln!(f, "{label}: {}", counts(count.cases, count.mismatches))?;
        }
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        let (cases, mismatches) = self.total();
        write!(f, "{}", counts(cases, mismatches))?;
        match self.errors {
            0 => writeln!(f),
            n => writeln!(f, ", {} could not be run", plural(n, "file", "files")),
        }
    }
}
