//! Which recipes a training compares.

use crate::recipes::BASELINE;
use anyhow::{Result, anyhow};
use nvfp4_recipe::Recipe;
use std::path::Path;

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
    fn every_ablation_is_a_recipe() {
        ABLATIONS.iter().for_each(|name| assert_eq!(find(name).unwrap().name, *name));
    }
}
