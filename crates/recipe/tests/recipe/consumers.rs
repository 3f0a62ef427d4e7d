//! What may be done with scales per row, cell by cell.

use crate::tools::*;
use nvfp4::GlobalScale::{PerRow, PerTensor};
use nvfp4::Side;
use nvfp4_recipe::*;

/// Rows: uses. Columns: one scale per tensor in row and column direction, one per row in row and column direction.
/// y: as it is, i: in another way, n: not at all.
const MATRIX: [(Use, &str); 19] = [
    (Use::Dequantize, "y y y y"),
    (Use::Matmul, "y y y y"),
    (Use::GroupedMatmul, "y y y y"),
    (Use::Accumulate, "y y y y"),
    (Use::QuantizedOutput, "y y i i"),
    (Use::View, "y y y y"),
    (Use::Copy, "y y y y"),
    (Use::SliceRows, "y i y i"),
    (Use::SplitRows, "y y y y"),
    (Use::KnownAmax, "y y y y"),
    (Use::Swizzle, "y y y y"),
    (Use::Save, "y y y y"),
    (Use::FusedNorm, "y y i i"), // fusible_norm_hybrid_output_falls_back_to_explicit_quantize
    (Use::FusedActivation, "y y i i"),
    (Use::FusedBiasGradient, "y y i i"),
    (Use::AllGather, "i i y n"), // supports_only_rowwise_all_gather_nvfp4_columnwise and …_both
    (Use::Shard, "i i y n"),
    (Use::Overlap, "y y n n"),
    (Use::Attention, "n n n n"),
];

#[test]
fn the_matrix_cell_by_cell() {
    assert_eq!(MATRIX.map(|(usage, _)| usage), Use::ALL, "every use has a row");
    for (usage, row) in MATRIX {
        let columns = [(PerTensor, Side::Row), (PerTensor, Side::Column), (PerRow, Side::Row), (PerRow, Side::Column)];
        for ((scale, side), expected) in columns.into_iter().zip(row.split(' ')) {
            let found = match support(usage, scale, side) {
                Support::Yes => "y",
                Support::Instead(how) if !how.is_empty() => "i",
                Support::No(fix) if !fix.is_empty() => "n",
                _ => "an answer without a text",
            };
            assert_eq!(found, expected, "{usage}: {scale:?}, {side}");
        }
    }
}

/// A plan refuses exactly the uses that the matrix refuses.
#[test]
fn a_plan_asks_the_matrix() {
    for usage in Use::ALL {
        for name in ["nvfp4", "nvfp4_row_scaled", "nvfp4_row_scaled_fwd_high_precision_bwd", "mxfp8"] {
            let input = recipe(name).spec(&Role::new(Site::new("fc", LinearSlot::Input))).unwrap();
            let refused: Vec<Side> = [Side::Row, Side::Column]
                .into_iter()
                .filter(|&side| match input.format(side) {
                    Format::Nvfp4(format) => matches!(support(usage, format.global_scale(), side), Support::No(_)),
                    _ => false,
                })
                .collect();
            let model = model([Module::linear("fc").used(LinearSlot::Input, usage)]);
            match (try_plan(&model, &recipe(name)), refused.is_empty()) {
                (Ok(_), true) => {}
                (Err(_), false) => {
                    let problems = problems(&model, &recipe(name));
                    let sides: Vec<Side> = problems
                        .iter()
                        .map(|problem| match problem {
                            Problem::Use { side, .. } => *side,
                            other => panic!("{other}"),
                        })
                        .collect();
                    assert_eq!(sides, refused, "{usage} {name}");
                    let message = problems[0].to_string();
                    assert!(message.starts_with(&format!("fc:input: {input} does not allow {usage} (")), "{message}");
                }
                (result, _) => panic!("{usage} {name}: {result:?}"),
            }
        }
    }
}

/// Sequence parallelism and sharding with scales per row, of which upstream has no test.
#[test]
fn row_scaled_rows_travel_with_their_scales() {
    let gathered = || model([Module::linear("fc").used(LinearSlot::Input, Use::AllGather)]);
    plan(&gathered(), &recipe("nvfp4_row_scaled_fwd_high_precision_bwd"));
    plan(&gathered(), &linear("nvfp4(row-scaled) / nvfp4", "nvfp4", "nvfp4"));
    let refused = problems(&gathered(), &linear("nvfp4(row-scaled)", "nvfp4", "nvfp4"));
    assert!(refused[0].to_string().contains("gather in high precision and quantize after"));
    let sharded = || model([Module::linear("fc").used(LinearSlot::Weight, Use::Shard)]);
    plan(&sharded(), &linear("nvfp4", "nvfp4(row-scaled) / nvfp4", "nvfp4"));
    assert_eq!(problems(&sharded(), &linear("nvfp4", "nvfp4(row-scaled)", "nvfp4")).len(), 1);
}

/// native_gemm_output_quantizer_support_is_opt_in: a format that nobody knows is refused, until someone says that he does.
#[test]
fn unknown_formats_are_opt_in() {
    let (fc, own) = (model([Module::linear("fc")]), linear("custom(mine)", "custom(mine)", "custom(mine)"));
    assert_eq!(problems(&fc, &own).len(), 3);
    let message = problems(&fc, &own)[0].to_string();
    assert!(
        message.starts_with(
            "fc:input: custom(mine) needs custom(mine), a format of your own. Say that your program runs it"
        ),
        "{message}"
    );
    let device = Capabilities::software().with_custom("mine".parse().unwrap());
    let plan = Plan::build(&fc, &own, &device).unwrap();
    assert_eq!(plan.execution()[&Family::Custom("mine".parse().unwrap())], Execution::Software);
}
