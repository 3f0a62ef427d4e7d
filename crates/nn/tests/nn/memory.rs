//! What is kept for the backward pass, against bf16.

use crate::cases::*;
use candle_core::{DType, Device, Module};
use nvfp4_nn::*;

/// Bytes that a module keeps, and that candle's graph keeps beside it.
fn kept(kind: &str, recipe: &nvfp4_recipe::Recipe) -> (usize, usize) {
    let case = Case::with(kind, recipe, 1);
    let y = case.module.forward(&case.x.var).unwrap();
    (case.session.kept_bytes(), graph_bytes(&y))
}

/// Inputs of linear layers: 4.5 bits a value and one scale of 32 bits instead of 16 bits, so 3.5 times less and a little.
#[test]
fn inputs_are_kept_in_four_bits_and_a_half() {
    for kind in ["linear", "layer norm linear", "rms norm linear", "grouped linear"] {
        let ((codes, _), (bf16, _)) = (kept(kind, &recipe("nvfp4")), kept(kind, &all("high-precision(bf16)")));
        let rows = if kind == "grouped linear" { 32 + 16 + 32 } else { BATCH * TOKENS };
        let scales = if kind == "grouped linear" { 3 } else { 1 };
        assert_eq!(codes, rows * HIDDEN * 9 / 16 + 4 * scales, "{kind}");
        assert_eq!(bf16, 2 * BATCH * TOKENS * HIDDEN, "{kind}: nothing to pad");
    }
}

/// An MLP keeps, beside both inputs, what its activation is a function of, in the type of the model.
#[test]
fn an_mlp_keeps_two_inputs_and_what_its_activation_needs() {
    let tokens = BATCH * TOKENS;
    for (kind, before, after) in [("gelu mlp", 96, 96), ("swiglu mlp", 192, 96)] {
        let (codes, graph) = kept(kind, &recipe("nvfp4"));
        assert_eq!(codes, tokens * (HIDDEN + after) * 9 / 16 + 8 + 4 * tokens * before, "{kind}");
        assert_eq!(graph, 4 * tokens * HIDDEN, "{kind}: the output alone");
        let (plain, graph) = kept(kind, &recipe("high_precision"));
        assert!(
            plain == 0 && graph > 4 * tokens * (HIDDEN + before + after),
            "{kind}: candle keeps all that lies between"
        );
    }
}

/// The table of docs/training.md, row for row.
#[test]
fn the_guide_says_what_is_kept() {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/training.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let (gpt, llama) = (LayerConfig::gpt(256, 4), LayerConfig::llama(256, 4, 2, 688));
    let (nvfp4, bf16, high) = (recipe("nvfp4"), all("high-precision(bf16)"), recipe("high_precision"));
    for (name, config, recipe) in [
        ("GPT layer, `nvfp4`", gpt, &nvfp4),
        ("GPT layer, operands in bf16", gpt, &bf16),
        ("GPT layer, `high_precision`", gpt, &high),
        ("Llama layer, 2 groups, 688 inside, `nvfp4`", llama, &nvfp4),
        ("Llama layer, operands in bf16", llama, &bf16),
        ("Llama layer, `high_precision`", llama, &high),
    ] {
        let session = Session::new(1);
        let place = session.place(DType::F32, &Device::Cpu);
        let x = place.parameter("x", (4, 128, 256), Init::Normal(1.0)).unwrap();
        let layer = TransformerLayer::new(&place.child("m"), config).unwrap();
        session.apply(recipe).unwrap();
        let y = layer.forward(&x.var).unwrap();
        let row = format!("| {name} | {} | {} |", grouped(session.kept_bytes()), grouped(graph_bytes(&y)));
        assert!(guide.contains(&row), "docs/training.md does not have {row}");
    }
}

/// A number as people write it: 1,234,567.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let parts: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|part| str::from_utf8(part).unwrap()).collect();
    parts.join(",")
}
