//! Recipes by name: what NVFP4 is compared with, and the preset `nvfp4` less or more one thing. They are the files of `crates/cli/recipes`.

use anyhow::{Result, anyhow};
use nvfp4_recipe::Recipe;
use std::path::Path;

/// The baseline of every comparison.
pub const BASELINE: &str = "bf16";

/// Name and rule file.
pub const NAMED: [(&str, &str); 10] = [
    (BASELINE, include_str!("../../recipes/bf16.toml")),
    ("nvfp4-no-hadamard", include_str!("../../recipes/nvfp4-no-hadamard.toml")),
    ("nvfp4-no-stochastic", include_str!("../../recipes/nvfp4-no-stochastic.toml")),
    ("nvfp4-1d-weights", include_str!("../../recipes/nvfp4-1d-weights.toml")),
    ("nvfp4-4over6-weights", include_str!("../../recipes/nvfp4-4over6-weights.toml")),
    ("nvfp4-4over6-activations", include_str!("../../recipes/nvfp4-4over6-activations.toml")),
    ("nvfp4-4over6-forward", include_str!("../../recipes/nvfp4-4over6-forward.toml")),
    ("nvfp4-no-hadamard-4over6-activations", include_str!("../../recipes/nvfp4-no-hadamard-4over6-activations.toml")),
    ("nvfp4-forward-only", include_str!("../../recipes/nvfp4-forward-only.toml")),
    ("nvfp4-backward-only", include_str!("../../recipes/nvfp4-backward-only.toml")),
];

/// All that `--ablations` runs.
pub const ABLATIONS: [&str; 7] = [
    BASELINE,
    "nvfp4",
    "nvfp4-no-hadamard",
    "nvfp4-no-stochastic",
    "nvfp4-1d-weights",
    "nvfp4_4over6",
    "nvfp4_row_scaled",
];

/// A recipe and what it is called in tables and files.
#[derive(Clone)]
pub struct Named {
    pub name: String,
    pub recipe: Recipe,
}

/// A recipe by its name, a preset, or a rule file, which is called by its file's name.
pub fn find(text: &str) -> Result<Named> {
    // The text has the cause in it; `anyhow!(error)` would say it twice.
    let recipe = crate::recipe::read(text).map_err(|error| anyhow!("--recipe {error}"))?;
    let name = Path::new(text).file_stem().map_or(text.to_string(), |stem| stem.to_string_lossy().into_owned());
    Ok(Named { name, recipe })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_recipe() {
        for (name, text) in NAMED {
            assert_eq!(find(name).unwrap().recipe, Recipe::from_toml(text).unwrap());
            assert!(text.contains(&format!("name = \"{name}\"")), "{name}");
        }
        ABLATIONS.iter().for_each(|name| assert_eq!(find(name).unwrap().name, *name));
    }
}
