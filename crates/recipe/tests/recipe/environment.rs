//! TransformerEngine's environment variables.

use crate::tools::*;
use nvfp4::{ErrorPath, GlobalScale, Metric, Rounding, Tile, Transform};
use nvfp4_recipe::*;

fn from(variables: &[(&str, &str)]) -> Result<Recipe> {
    Recipe::from_vars(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
}

fn expect(variables: &[(&str, &str)], training: Nvfp4Training) {
    assert_eq!(from(variables).unwrap(), Recipe::from(training), "{variables:?}");
}

#[test]
fn each_variable() {
    let default = Nvfp4Training::default();
    expect(&[], default);
    expect(&[("NVTE_NVFP4_DISABLE_RHT", "0"), ("NVTE_NVFP4_4OVER6", "")], default);
    expect(&[("NVTE_NVFP4_DISABLE_RHT", "1")], Nvfp4Training { transform: Transform::None, ..default });
    let gradients = Rounding::NearestEven;
    expect(&[("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")], Nvfp4Training { gradients, ..default });
    expect(&[("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1")], Nvfp4Training { weights: Tile::Row16, ..default });
    let row_scaled = Nvfp4Training { activations: GlobalScale::PerRow, ..default };
    expect(&[("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1")], row_scaled);
    expect(&[("NVTE_NVFP4_PER_TOKEN_ACTIVATION", "1")], row_scaled);
    expect(&[("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1"), ("NVTE_NVFP4_PER_TOKEN_ACTIVATION", "1")], row_scaled);
    for (value, scope) in
        [("none", Scope::None), ("weights", Scope::Weights), ("activations", Scope::Activations), ("all", Scope::All)]
    {
        expect(&[("NVTE_NVFP4_4OVER6", value)], Nvfp4Training { four_over_six: scope, ..default });
        let all = Nvfp4Training { four_over_six: Scope::All, ..default };
        let variables = [("NVTE_NVFP4_4OVER6", "all"), ("NVTE_NVFP4_4OVER6_E4M3_USE_256", value)];
        expect(&variables, Nvfp4Training { bound_256: scope, ..all });
    }
    expect(
        &[
            ("NVTE_NVFP4_4OVER6", "weights"),
            ("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE"),
            ("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1"),
        ],
        Nvfp4Training { four_over_six: Scope::Weights, metric: Metric::Mse, error: ErrorPath::Fast, ..default },
    );
    let backward = |value| from(&[("NVTE_BACKWARD_OVERRIDE", value)]).unwrap().backward();
    assert_eq!(backward("none"), BackwardOverride::None);
    assert_eq!(backward("high_precision"), BackwardOverride::HighPrecision);
    assert_eq!(backward("dequantized"), BackwardOverride::Dequantized);
}

/// Each of these alone is enough here; upstream needs others beside them and does not say which.
#[test]
fn row_scaling_and_4over6_need_no_other_switch() {
    for (name, value) in
        [("NVTE_NVFP4_4OVER6", "all"), ("NVTE_NVFP4_4OVER6", "activations"), ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1")]
    {
        plan(&zoo(), &from(&[(name, value)]).unwrap());
    }
}

#[test]
fn all_wrong_values_are_listed_with_what_is_allowed() {
    let problems = unwrap_problems(from(&[
        ("NVTE_NVFP4_DISABLE_RHT", "yes"),
        ("NVTE_NVFP4_4OVER6", "weight"),
        ("NVTE_NVFP4_4OVER6_ERR_MODE", "mae"),
        ("NVTE_BACKWARD_OVERRIDE", "bf16"),
        ("NVTE_USE_FAST_MATH", "2"),
    ]));
    let problems: Vec<String> = problems.iter().map(Problem::to_string).collect();
    assert_eq!(
        problems,
        [
            "NVTE_NVFP4_DISABLE_RHT: unknown value 'yes'; allowed are 0, 1",
            "NVTE_NVFP4_4OVER6: unknown value 'weight'; allowed are none, weights, activations, all",
            "NVTE_NVFP4_4OVER6_ERR_MODE: unknown value 'mae'; allowed are MAE, MSE",
            "NVTE_BACKWARD_OVERRIDE: unknown value 'bf16'; allowed are none, high_precision, dequantized",
            "NVTE_USE_FAST_MATH: unknown value '2'; allowed are 0, 1",
        ]
    );
}

#[test]
fn a_switch_that_needs_another_says_which() {
    for (name, value) in [
        ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "weights"),
        ("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE"),
        ("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1"),
    ] {
        assert_eq!(
            unwrap_problems(from(&[(name, value)]))[0].to_string(),
            format!("{name}: needs NVTE_NVFP4_4OVER6=weights, activations or all; set that, or unset this")
        );
    }
    // Where 4over6 itself is wrong, that is all there is to say.
    assert_eq!(
        unwrap_problems(from(&[("NVTE_NVFP4_4OVER6", "weight"), ("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE")])).len(),
        1
    );
    // What would hold anyway, or asks for nothing, needs nothing.
    for (name, value) in [("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none"), ("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE")] {
        from(&[(name, value)]).unwrap();
    }
    let both = [("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1"), ("NVTE_NVFP4_PER_TOKEN_ACTIVATION", "0")];
    assert_eq!(
        unwrap_problems(from(&both))[0].to_string(),
        "NVTE_NVFP4_PER_TOKEN_ACTIVATION: is the older name of NVTE_NVFP4_ROW_SCALED_ACTIVATION, which has another value; \
         unset one"
    );
}

#[test]
fn fast_math_changes_no_byte_and_says_so() {
    let recipe = from(&[("NVTE_USE_FAST_MATH", "1")]).unwrap();
    assert_eq!(recipe, from(&[]).unwrap());
    let warnings: Vec<String> = plan(&zoo(), &recipe).warnings().iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["NVTE_USE_FAST_MATH=1 has no effect: the bytes are TransformerEngine's without it"]);
}
