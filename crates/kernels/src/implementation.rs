//! Which version of an operation runs.

#[cfg(target_arch = "x86_64")]
use crate::avx2::Avx2;
use std::fmt;
use std::str::FromStr;

/// A way to compute; all of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Implementation {
    /// The rules as `spec` writes them.
    Scalar,
    /// AVX2, FMA and F16C, on all threads of the current rayon pool.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

impl Implementation {
    /// The fastest implementation that this machine can run.
    pub fn best() -> Self {
        Self::available().pop().expect("the scalar implementation is always available")
    }

    /// Every implementation that this machine can run, the plainest first.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Implementation::Scalar];
        #[cfg(target_arch = "x86_64")]
        all.extend(Avx2::detect().map(Implementation::Avx2));
        all
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Implementation::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx2(_) => "avx2",
        })
    }
}

impl FromStr for Implementation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::available().into_iter().find(|i| i.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = Self::available().iter().map(Self::to_string).collect();
            format!("this machine and build cannot run '{name}'; available: {}", names.join(", "))
        })
    }
}
