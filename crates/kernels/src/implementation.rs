//! Which version of an operation runs.

#[cfg(target_arch = "x86_64")]
use crate::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use crate::avx512::Avx512;
#[cfg(feature = "cuda")]
use crate::cuda::Device;
#[cfg(target_arch = "aarch64")]
use crate::vector::Neon;
use std::fmt;
use std::str::FromStr;

/// A way to compute. All of them give the same bits, except products with a plain or FP8 operand
/// and all products on a GPU: those are within a bound.
///
/// ```
/// use nvfp4_kernels::Implementation;
///
/// assert_eq!("scalar".parse(), Ok(Implementation::Scalar));
/// // The simplest comes first, and the best is among them.
/// let all = Implementation::available();
/// assert_eq!(all[0], Implementation::Scalar);
/// assert!(all.contains(&Implementation::best()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Implementation {
    /// The rules as `spec` writes them; quantization on all threads.
    Scalar,
    /// AVX2, FMA and F16C, on all threads of the current rayon pool.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 in quantization (rows by TransformerEngine's rules; columns of 16-bit elements by all)
    /// and, with VNNI and BF16, in products; AVX2 elsewhere.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON, on all threads of the current rayon pool; in products also dot products of bytes, if
    /// the CPU has them.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// A GPU. Operations on host slices copy there and back.
    #[cfg(feature = "cuda")]
    Cuda(Device),
}

impl Implementation {
    /// The fastest implementation on the CPU, where host slices are.
    pub fn best() -> Self {
        Self::on_cpu().pop().expect("the scalar implementation is always available")
    }

    /// Every implementation that this machine can run, the simplest first. The first GPU comes
    /// last, if there is one and NVRTC too.
    pub fn available() -> Vec<Self> {
        let all = Self::on_cpu();
        #[cfg(feature = "cuda")]
        let all = all.into_iter().chain(cuda().ok()).collect();
        all
    }

    /// Whether it is a GPU.
    pub fn is_gpu(self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Implementation::Cuda(_) => true,
            _ => false,
        }
    }

    fn on_cpu() -> Vec<Self> {
        let mut all = vec![Implementation::Scalar];
        #[cfg(target_arch = "x86_64")]
        all.extend(Avx2::detect().map(Implementation::Avx2));
        #[cfg(target_arch = "x86_64")]
        all.extend(Avx512::detect().map(Implementation::Avx512));
        #[cfg(target_arch = "aarch64")]
        all.extend(Neon::detect().map(Implementation::Neon));
        all
    }
}

#[cfg(target_arch = "x86_64")]
impl From<Avx2> for Implementation {
    fn from(token: Avx2) -> Self {
        Implementation::Avx2(token)
    }
}

#[cfg(target_arch = "aarch64")]
impl From<Neon> for Implementation {
    fn from(token: Neon) -> Self {
        Implementation::Neon(token)
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Implementation::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Implementation::Neon(_) => "neon",
            #[cfg(feature = "cuda")]
            Implementation::Cuda(_) => "cuda",
        })
    }
}

impl FromStr for Implementation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "cuda" {
            return cuda();
        }
        Self::on_cpu().into_iter().find(|i| i.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = Self::available().iter().map(Self::to_string).collect();
            format!("this machine and build cannot run '{name}'; available: {}", names.join(", "))
        })
    }
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Implementation, String> {
    let device = Device::open(0).and_then(|device| crate::cuda::compiler_version().map(|_| device));
    device.map(Implementation::Cuda).map_err(|reason| format!("this machine cannot run 'cuda': {reason}"))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Implementation, String> {
    Err("this build cannot run 'cuda': build it with the feature `cuda`".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_implementation_is_found_by_its_name() {
        for implementation in Implementation::available() {
            assert_eq!(implementation.to_string().parse(), Ok(implementation));
        }
        assert!(Implementation::on_cpu().contains(&Implementation::best()));
    }

    #[test]
    fn a_missing_implementation_says_why() {
        let unknown = "abacus".parse::<Implementation>().unwrap_err();
        assert!(unknown.starts_with("this machine and build cannot run 'abacus'; available: scalar"), "{unknown}");
        if let Err(reason) = "cuda".parse::<Implementation>() {
            let which = if cfg!(feature = "cuda") { "this machine" } else { "this build" };
            assert!(reason.starts_with(&format!("{which} cannot run 'cuda': ")), "{reason}");
        }
    }
}
