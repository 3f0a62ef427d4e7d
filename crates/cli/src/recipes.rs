//! Recipes by name: what NVFP4 is compared with, and variants of the preset `nvfp4` with one change
//! each. They are the files of `crates/cli/recipes`.

/// The baseline of every comparison.
pub const BASELINE: &str = "bf16";

/// Name and rule file.
pub const NAMED: [(&str, &str); 10] = [
    (BASELINE, include_str!("../recipes/bf16.toml")),
    ("nvfp4-no-hadamard", include_str!("../recipes/nvfp4-no-hadamard.toml")),
    ("nvfp4-no-stochastic", include_str!("../recipes/nvfp4-no-stochastic.toml")),
    ("nvfp4-1d-weights", include_str!("../recipes/nvfp4-1d-weights.toml")),
    ("nvfp4-4over6-weights", include_str!("../recipes/nvfp4-4over6-weights.toml")),
    ("nvfp4-4over6-activations", include_str!("../recipes/nvfp4-4over6-activations.toml")),
    ("nvfp4-4over6-forward", include_str!("../recipes/nvfp4-4over6-forward.toml")),
    ("nvfp4-no-hadamard-4over6-activations", include_str!("../recipes/nvfp4-no-hadamard-4over6-activations.toml")),
    ("nvfp4-forward-only", include_str!("../recipes/nvfp4-forward-only.toml")),
    ("nvfp4-backward-only", include_str!("../recipes/nvfp4-backward-only.toml")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_recipe::Recipe;

    #[test]
    fn every_name_is_a_recipe() {
        for (name, text) in NAMED {
            assert_eq!(crate::recipe::read(name).unwrap(), Recipe::from_toml(text).unwrap());
            assert!(text.contains(&format!("name = \"{name}\"")), "{name}");
        }
    }
}
