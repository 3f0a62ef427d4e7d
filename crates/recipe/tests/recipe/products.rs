//! Which formats meet in a product: every pair of formats, in every product.

use crate::specs::formats;
use crate::tools::*;
use nvfp4::Side;
use nvfp4_recipe::*;

/// One format of each family, with and without a transform.
const KINDS: [&str; 11] = [
    "high-precision",
    "fp8(e4m3)",
    "fp8(e5m2)",
    "fp8-delayed(e4m3)",
    "fp8-block(e4m3)",
    "fp8-block(e4m3, 128x128)",
    "mxfp8(e4m3)",
    "nvfp4",
    "nvfp4(row-scaled)",
    "nvfp4(hadamard)",
    "custom(x)",
];

/// The table: what a product of the two does. h: high precision, m: mixed, q: quantized, F: formats differ, R: transforms differ.
/// The transform is read in the column direction only.
const COLUMNS: [&str; 11] = [
    //hp 43 52 dl 1b 2b mx nv rs ha cu
    "h m m m m m m m m R F", // high-precision
    "m q q q F F F F F F F", // fp8(e4m3)
    "m q q q F F F F F F F", // fp8(e5m2)
    "m q q q F F F F F F F", // fp8-delayed
    "m F F F q q F F F F F", // fp8-block 1x128
    "m F F F q q F F F F F", // fp8-block 128x128
    "m F F F F F q F F F F", // mxfp8
    "m F F F F F F q q R F", // nvfp4
    "m F F F F F F q q R F", // nvfp4(row-scaled)
    "R F F F F F F R R q F", // nvfp4(hadamard)
    "F F F F F F F F F F q", // custom
];

fn letter(result: Result<Arithmetic, Conflict>) -> &'static str {
    match result {
        Ok(Arithmetic::HighPrecision) => "h",
        Ok(Arithmetic::Mixed) => "m",
        Ok(Arithmetic::Quantized) => "q",
        Err(Conflict::Formats) => "F",
        Err(Conflict::Rotation { .. }) => "R",
        Err(_) => "?",
    }
}

#[test]
fn every_pair_of_formats() {
    for (left, line) in KINDS.iter().zip(COLUMNS) {
        for (right, expected) in KINDS.iter().zip(line.split(' ')) {
            let [a, b]: [Format; 2] = [left.parse().unwrap(), right.parse().unwrap()];
            let found = letter(multiply((&a, Side::Column), (&b, Side::Column)));
            assert_eq!(found, expected, "{left} · {right}");
            // Along rows there is no transform, so what differed by it goes together.
            let rows = match (expected, *left == "high-precision" || *right == "high-precision") {
                ("R", true) => "m",
                ("R", false) => "q",
                (other, _) => other,
            };
            assert_eq!(letter(multiply((&a, Side::Row), (&b, Side::Row))), rows, "{left} · {right} along rows");
        }
    }
}

#[test]
fn products_do_not_depend_on_the_order_of_operands() {
    let formats = formats();
    for a in formats.iter().step_by(3) {
        for b in &formats {
            let (one, other) =
                (multiply((a, Side::Column), (b, Side::Column)), multiply((b, Side::Column), (a, Side::Column)));
            assert_eq!(letter(one), letter(other), "{a} · {b}");
        }
    }
}

/// The same table through a plan: for each product of a linear layer and each pair of formats on its two sides, with everything
/// else in high precision, the plan is built or refused, and the message names the product, both operands and both changes.
#[test]
fn every_pair_of_formats_in_every_product_of_a_plan() {
    let high = Format::HIGH_PRECISION;
    for product in ["fprop", "dgrad", "wgrad"] {
        for left in KINDS {
            for right in KINDS {
                let [a, b]: [Format; 2] = [left.parse().unwrap(), right.parse().unwrap()];
                let rows = match product {
                    "fprop" => &[left, right][..],
                    "dgrad" => &[left],
                    _ => &[],
                };
                if rows.iter().any(|row| row.contains("hadamard")) {
                    continue; // a row format has no transform, which is another test
                }
                let split = |row: &Format, col: &Format| {
                    QuantSpec::split(row.clone(), col.clone(), ColumnSource::Original).unwrap()
                };
                let (input, weight, grad) = match product {
                    "fprop" => (split(&a, &high), split(&b, &high), split(&high, &high)),
                    "dgrad" => (split(&high, &high), split(&high, &b), split(&a, &high)),
                    _ => (split(&high, &b), split(&high, &high), split(&high, &a)),
                };
                let recipe = linear(&input.to_string(), &weight.to_string(), &grad.to_string());
                let device = Capabilities::software().with_custom("x".parse().unwrap());
                let modules = [Module::linear("fc"), Module::grouped_linear("fc", 2)];
                for module in modules {
                    let result = Plan::build(&model([module]), &recipe, &device);
                    let side = if product == "wgrad" { Side::Column } else { Side::Row };
                    let weight_side = if product == "dgrad" { Side::Column } else { side };
                    match letter(multiply((&a, side), (&b, weight_side))) {
                        "h" | "m" | "q" => assert!(result.is_ok(), "{product}: {left} · {right}: {result:?}"),
                        _ => {
                            let problems = unwrap_problems(result);
                            let message = problems[0].to_string();
                            let parts = [product, "Change recipe ", " is ", " but ", &a.to_string(), &b.to_string()];
                            for part in parts {
                                assert!(message.contains(part), "{product}: {left} · {right}: '{part}' in {message}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn mismatched_columnwise_formats_raise() {
    let recipe = linear("nvfp4 / mxfp8", "nvfp4", "nvfp4");
    let messages: Vec<String> =
        problems(&model([Module::linear("tl1.mlp.fc1")]), &recipe).iter().map(Problem::to_string).collect();
    assert_eq!(
        messages,
        [format!(
            "tl1.mlp.fc1 wgrad: grad_output.column is nvfp4 but input.column is mxfp8(e4m3); a product reads one format, or one \
             beside high precision. Change recipe {} for grad_output or input",
            recipe.name()
        )]
    );
}

#[test]
fn matching_columnwise_formats_succeed() {
    plan(&model([Module::linear("fc")]), &linear("nvfp4 / mxfp8", "nvfp4", "nvfp4 / mxfp8"));
}

/// A rotation on one side only would give a wrong weight gradient without a word.
#[test]
fn rotations_must_be_equal() {
    let message = |input: &str, grad: &str| {
        problems(&model([Module::linear("fc")]), &linear(input, "nvfp4", grad))[0].to_string()
    };
    for (input, grad) in [
        ("nvfp4(hadamard)", "nvfp4"),
        ("nvfp4", "nvfp4(hadamard)"),
        ("nvfp4(hadamard)", "nvfp4(hadamard=0x0001)"),
        ("nvfp4(hadamard)", "high-precision"),
    ] {
        let message = message(input, grad);
        assert!(message.starts_with("fc wgrad: "), "{message}");
        assert!(message.contains("Hadamard transforms cancel only if both operands have the same"), "{message}");
    }
    // Signs that are the fixed ones are the same, however they are written.
    plan(&model([Module::linear("fc")]), &linear("nvfp4(hadamard)", "nvfp4", "nvfp4(hadamard=0xd7e8)"));
    let weight = problems(&model([Module::linear("fc")]), &linear("nvfp4", "nvfp4(hadamard)", "nvfp4"));
    assert!(
        weight[0].to_string().starts_with("fc dgrad: grad_output.row is nvfp4 but weight.column is nvfp4(hadamard)")
    );
}

/// TestHybridThreeFormats: each product in a format of its own.
#[test]
fn fp8_fprop_mxfp8_dgrad_nvfp4_wgrad() {
    let fc = model([Module::linear("fc")]);
    plan(&fc, &linear("fp8 / nvfp4", "fp8 / mxfp8", "mxfp8 / nvfp4"));
    // nvfp4_fprop_fp8_dgrad_mxfp8_wgrad, and the same format in both backward products.
    plan(&fc, &linear("nvfp4 / mxfp8", "nvfp4 / fp8(e4m3)", "fp8(e5m2) / mxfp8"));
    plan(&fc, &linear("nvfp4 / mxfp8", "nvfp4 / mxfp8", "mxfp8"));
}

/// TestHybridReversedDirection, TestHybridMixedWithNonHybrid, TestHybridCrossFormatParametrized.
#[test]
fn hybrid_and_plain_operands() {
    let fc = model([Module::linear("fc")]);
    plan(&fc, &linear("nvfp4 / fp8(e4m3)", "nvfp4 / fp8(e4m3)", "fp8(e5m2)"));
    plan(&fc, &linear("mxfp8 / nvfp4", "mxfp8", "mxfp8 / nvfp4"));
    plan(&fc, &linear("mxfp8", "mxfp8 / nvfp4", "nvfp4 / mxfp8"));
    let formats = ["fp8(e4m3)", "fp8-block(e4m3)", "mxfp8", "nvfp4"];
    for row in formats {
        for col in formats {
            let split = format!("{row} / {col}");
            plan(&fc, &linear(&split, &split, col));
        }
    }
}

/// Weights alone, or activations alone: the other operand is high precision.
#[test]
fn one_operand_may_be_high_precision() {
    plan(&zoo(), &linear("high-precision", "nvfp4(16x16)", "high-precision"));
    plan(&zoo(), &linear("mxfp8", "high-precision", "mxfp8"));
    let mut inference = Model::for_inference();
    inference.add(Module::linear("fc"));
    plan(&inference, &linear("high-precision", "nvfp4", "high-precision"));
}

#[test]
fn users_products_are_checked() {
    let slots = ["tokens", "keys"].map(|name| ExtensionSlot::new("memory", name, Pass::Forward).unwrap());
    let [tokens, keys] = slots.clone();
    let product = Product::new("scores", Operand::new(tokens, Side::Row), Operand::new(keys, Side::Row));
    let module = slots.into_iter().fold(Module::extension("m"), Module::slot).product(product);
    let recipe =
        Recipe::from_toml("[[rule]]\nslot = 'memory:keys'\nspec = 'nvfp4'\n[default]\nspec = 'mxfp8'").unwrap();
    assert_eq!(
        problems(&model([module]), &recipe)[0].to_string(),
        "m scores: memory:tokens.row is mxfp8(e4m3) but memory:keys.row is nvfp4; a product reads one format, or one beside \
         high precision. Change the default for memory:tokens or rule 1 (line 1) for memory:keys"
    );
}

/// What the plan says about two NVFP4 operands is what the product does with them.
#[test]
fn the_plan_and_the_product_agree() {
    use nvfp4::{Directions, Error, Options, Product as Call, Quantizer, Randomness, Rounding, TensorRef};
    let x: Vec<f32> = (0..32 * 32).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
    let x = TensorRef::new(&x[..], &[32, 32]).unwrap();
    let formats: Vec<Nvfp4> = formats()
        .into_iter()
        .filter_map(|format| match format {
            Format::Nvfp4(format) => Some(format),
            _ => None,
        })
        .step_by(5)
        .collect();
    let quantized: Vec<_> = formats
        .iter()
        .map(|format| {
            let randomness =
                Some(Randomness::At { seed: 1, offset: 0 }).filter(|_| format.rounding() == Rounding::Stochastic);
            let options = Options { randomness, ..Options::default() };
            Quantizer::new(*format, Directions::Both).unwrap().quantize_with(&x, &options).unwrap()
        })
        .collect();
    for (a, qa) in formats.iter().zip(&quantized) {
        for (b, qb) in formats.iter().zip(&quantized) {
            for sides in [(Side::Row, Side::Row), (Side::Row, Side::Column), (Side::Column, Side::Column)] {
                let planned = multiply((&Format::Nvfp4(*a), sides.0), (&Format::Nvfp4(*b), sides.1));
                let (left, right) = (qa.direction(sides.0).unwrap(), qb.direction(sides.1).unwrap());
                match (planned, nvfp4::matmul::<f32>(left, right, &Call::default())) {
                    (Ok(Arithmetic::Quantized), Ok(_)) => {}
                    (Err(Conflict::Rotation { .. }), Err(Error::Rotation { .. })) => {}
                    (planned, found) => panic!("{a} · {b}: the plan says {planned:?}, the product {:?}", found.err()),
                }
            }
        }
    }
}
