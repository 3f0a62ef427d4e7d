//! Which kernels a server takes for the NVFP4 weights of a checkpoint on a GPU, by the server's own
//! rules. They are read from the sources that each answer names; none was run here.

use super::client::Client;
use super::dialect::Model;
use super::weight::Stored;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The compute capability of an NVIDIA GPU: 8.0 Ampere, 9.0 Hopper, 10.0 and 12.0 Blackwell.
///
/// ```
/// use nvfp4_checkpoint::Capability;
///
/// let hopper: Capability = "9.0".parse()?;
/// assert!(hopper < "10.0".parse()?);
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    major: u32,
    minor: u32,
}

impl FromStr for Capability {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
        let parts = text.split_once('.').and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
        let found = parts.filter(|(major, minor)| *major < 100 && *minor < 10);
        let (major, minor) = found.ok_or_else(|| {
            Error::Refused(format!("expected the compute capability of a GPU, such as 9.0, got '{text}'"))
        })?;
        Ok(Capability { major, minor })
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What happens to NVFP4 weights in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Weights and activations go to FP4 tensor cores.
    Native,
    /// Weights are decoded on their way into a product of another type.
    Decoded,
    /// Weights and activations are rounded to FP4, and multiplied in another type.
    Emulated,
    /// The server does not run it.
    Refused,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Native => "native",
            Path::Decoded => "decoded",
            Path::Emulated => "emulated",
            Path::Refused => "refused",
        })
    }
}

/// What a server does with a checkpoint on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelPath {
    /// What happens to the weights.
    pub path: Path,
    /// The kernels, and what follows for a user.
    pub kernels: &'static str,
    /// Where the rule was read.
    pub source: &'static str,
}

/// How activations come to NVFP4 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    W4A16,
    W4A4,
}

/// The kernels that a server takes for a checkpoint's NVFP4 weights on a GPU.
pub fn kernel_path(model: &Model<'_>, client: Client, gpu: Capability) -> KernelPath {
    let scaled = model.weights.iter().any(|w| matches!(&w.stored, Stored::Nvfp4(parts) if parts.input.is_some()));
    rule(client, if scaled { Scheme::W4A4 } else { Scheme::W4A16 }, gpu)
}

/// The kernels that llama.cpp takes for a GGUF file.
pub fn gguf_kernel_path(gpu: Capability) -> KernelPath {
    // GGUF says nothing about activations.
    rule(Client::LlamaCpp, Scheme::W4A16, gpu)
}

fn rule(client: Client, scheme: Scheme, gpu: Capability) -> KernelPath {
    let from = |major, minor| gpu >= Capability { major, minor };
    let (source, (path, kernels)) = match client {
        Client::Vllm => (
            "vLLM a014e35 (22 August 2026)",
            match scheme {
                _ if !from(7, 5) => (Path::Refused, "NVFP4 needs 7.5 (Turing) or newer"),
                Scheme::W4A16 => (
                    Path::Decoded,
                    "Marlin, dense and experts: weights become BF16 in registers; FP4 units are \
                not used, which needs a checkpoint with activation scales (--acts) and 10.0 or newer",
                ),
                Scheme::W4A4 if !from(10, 0) => (
                    Path::Decoded,
                    "Marlin, dense and experts: weights become BF16 in registers, \
                and activation scales are not used",
                ),
                Scheme::W4A4 if gpu.major == 10 => {
                    (Path::Native, "FlashInfer's CuTe DSL for dense layers, its TensorRT-LLM kernels for experts")
                }
                Scheme::W4A4 => (Path::Native, "FlashInfer's CUTLASS kernels, dense and experts"),
            },
        ),
        Client::SgLang => (
            "SGLang cce0a12 (23 August 2026)",
            match scheme {
                _ if !from(8, 0) => (Path::Refused, "NVFP4 needs 8.0 (Ampere) or newer"),
                Scheme::W4A16 => (
                    Path::Decoded,
                    "Marlin, in the release 0.5.23; this version refuses the algorithm \
                W4A16_NVFP4, and takes a checkpoint with activation scales (--acts const)",
                ),
                Scheme::W4A4 if !from(10, 0) => (
                    Path::Decoded,
                    "Marlin, dense and experts: weights become BF16 in registers, \
                and activation scales are not used",
                ),
                Scheme::W4A4 => (Path::Native, "FlashInfer, dense and experts"),
            },
        ),
        Client::TensorRtLlm => (
            "TensorRT-LLM's pull requests 13476 and 16511 (August 2026)",
            match (scheme, gpu.major) {
                (_, 9) => (Path::Decoded, "Marlin, which has to be chosen (pull request 13476)"),
                (_, ..10) => (Path::Refused, "NVFP4 needs 9.0 (Hopper) or newer"),
                (Scheme::W4A16, 12) => (Path::Decoded, "kernels for W4A16 (pull request 16511)"),
                (Scheme::W4A16, _) => (Path::Refused, "W4A16 was found for 9.0 and 12.x only; convert with --acts"),
                (Scheme::W4A4, _) => (Path::Native, "FP4 kernels, dense and experts"),
            },
        ),
        Client::LlamaCpp => (
            "llama.cpp b21e4de (22 August 2026)",
            match gpu.major {
                12 => (
                    Path::Native,
                    "its FP4 tensor core kernels: activations are rounded to FP4 for many tokens at once, \
                and to 8 bits for few",
                ),
                _ => (
                    Path::Decoded,
                    "its integer kernels: weights become 8-bit integers, activations are rounded to 8 bits",
                ),
            },
        ),
        Client::Transformers => (
            "compressed-tensors 0.19",
            match scheme {
                Scheme::W4A16 => (Path::Decoded, "weights are decoded, products are torch's in BF16"),
                Scheme::W4A4 => (
                    Path::Emulated,
                    "weights are decoded, activations rounded to FP4 and back, products are \
                torch's in BF16",
                ),
            },
        ),
        Client::ComfyUi => (
            "comfy-kitchen 0.2.40",
            match from(10, 0) {
                true => (Path::Native, "cuBLAS's FP4 products; activations are rounded to FP4"),
                false => (Path::Decoded, "weights are decoded, products are torch's"),
            },
        ),
    };
    KernelPath { path, kernels, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_has_a_rule_for_each_gpu() {
        let path = |client, scheme, gpu: &str| rule(client, scheme, gpu.parse().unwrap()).path;
        let cases = [
            (Client::Vllm, Scheme::W4A4, [Path::Refused, Path::Decoded, Path::Decoded, Path::Native, Path::Native]),
            (Client::Vllm, Scheme::W4A16, [Path::Refused, Path::Decoded, Path::Decoded, Path::Decoded, Path::Decoded]),
            (Client::SgLang, Scheme::W4A4, [Path::Refused, Path::Decoded, Path::Decoded, Path::Native, Path::Native]),
            (
                Client::TensorRtLlm,
                Scheme::W4A4,
                [Path::Refused, Path::Refused, Path::Decoded, Path::Native, Path::Native],
            ),
            (
                Client::TensorRtLlm,
                Scheme::W4A16,
                [Path::Refused, Path::Refused, Path::Decoded, Path::Refused, Path::Decoded],
            ),
            (
                Client::LlamaCpp,
                Scheme::W4A16,
                [Path::Decoded, Path::Decoded, Path::Decoded, Path::Decoded, Path::Native],
            ),
            (Client::Transformers, Scheme::W4A4, [Path::Emulated; 5]),
        ];
        for (client, scheme, expected) in cases {
            assert_eq!(
                ["7.0", "8.0", "9.0", "10.3", "12.0"].map(|gpu| path(client, scheme, gpu)),
                expected,
                "{client} {scheme:?}"
            );
        }
    }

    #[test]
    fn what_is_no_capability_is_refused() {
        for text in ["", "9", "9.", ".0", "sm_90", "9.0a", "+9.0", "9.10", "100.0", "-1.0"] {
            assert!(text.parse::<Capability>().is_err(), "{text}");
        }
        assert_eq!("12.1".parse::<Capability>().unwrap().to_string(), "12.1");
    }
}
