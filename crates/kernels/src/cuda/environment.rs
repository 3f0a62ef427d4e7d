//! The environment variables that the GPU runtime uses. They are read here only.

use std::ffi::OsString;
use std::path::PathBuf;

/// What the environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// Where compiled kernels and measured costs are kept: `NVFP4_CACHE_DIR`, else
    /// `$XDG_CACHE_HOME/nvfp4`, else `$HOME/.cache/nvfp4`. Without it kernels are compiled anew in
    /// every process, and costs are those that ship.
    pub cache: Option<PathBuf>,
    /// Folders that may hold NVRTC and cuBLASLt if the dynamic loader does not find them, the
    /// likeliest first: the libraries of `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda` and
    /// `CONDA_PREFIX`, then those that pip installed into `VIRTUAL_ENV` or `CONDA_PREFIX`.
    pub libraries: Vec<PathBuf>,
    /// Whether kernels use plain arithmetic instead of the chip's conversion instructions:
    /// `NVFP4_CUDA_PORTABLE`, any value but `0`. For tests; the bits are the same.
    pub portable: bool,
}

impl Environment {
    /// The environment of this process. A GPU's is read once, when it is opened.
    pub fn read() -> Self {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    fn from_lookup(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // A relative folder of these two would follow the working directory; the XDG specification
        // has it ignored.
        let xdg = || path("XDG_CACHE_HOME").filter(|p| p.is_absolute()).map(|p| p.join("nvfp4"));
        let home = || path("HOME").filter(|p| p.is_absolute()).map(|p| p.join(".cache/nvfp4"));
        let cache = path("NVFP4_CACHE_DIR").or_else(xdg).or_else(home);

        let toolkits = [path("CUDA_HOME"), path("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))];
        let mut libraries: Vec<PathBuf> =
            toolkits.into_iter().flatten().flat_map(|toolkit| [toolkit.join("lib64"), toolkit.join("lib")]).collect();
        libraries.extend(path("CONDA_PREFIX").map(|conda| conda.join("lib")));
        let environments = [path("VIRTUAL_ENV"), path("CONDA_PREFIX")].into_iter().flatten();
        for python in environments.filter_map(|e| e.join("lib").read_dir().ok()).flatten().flatten() {
            let packages = python.path().join("site-packages/nvidia");
            libraries.extend(["cu13/lib", "cuda_nvrtc/lib", "cublas/lib"].map(|folder| packages.join(folder)));
        }
        let portable = variable("NVFP4_CUDA_PORTABLE").is_some_and(|value| !value.is_empty() && value != "0");
        Environment { cache, libraries, portable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(variables: &[(&str, &str)]) -> Option<PathBuf> {
        Environment::from_lookup(|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.into())).cache
    }

    #[test]
    fn the_most_particular_folder_wins_and_empty_ones_do_not_count() {
        let (own, xdg, home) = (("NVFP4_CACHE_DIR", "/own"), ("XDG_CACHE_HOME", "/xdg"), ("HOME", "/home/me"));
        assert_eq!(cache(&[own, xdg, home]), Some("/own".into()));
        assert_eq!(cache(&[xdg, home]), Some("/xdg/nvfp4".into()));
        assert_eq!(cache(&[home]), Some("/home/me/.cache/nvfp4".into()));
        assert_eq!(cache(&[("NVFP4_CACHE_DIR", ""), ("XDG_CACHE_HOME", "here"), home]), cache(&[home]));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn toolkits_are_searched_in_order() {
        let environment = Environment::from_lookup(|name| match name {
            "CUDA_HOME" => Some("/opt/cuda".into()),
            "CONDA_PREFIX" => Some("/no/such/conda".into()),
            _ => None,
        });
        let toolkits = ["/opt/cuda/lib64", "/opt/cuda/lib", "/usr/local/cuda/lib64", "/usr/local/cuda/lib"];
        let expected = toolkits.into_iter().chain(["/no/such/conda/lib"]).map(PathBuf::from);
        assert_eq!(environment.libraries, expected.collect::<Vec<_>>());
    }
}
