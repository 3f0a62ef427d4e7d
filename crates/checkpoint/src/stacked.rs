//! Experts that lie in one tensor: whose they are, and the matrices that they consist of.
//!
//! | | gate and up | down |
//! |---|---|---|
//! | transformers 5, Qwen 3.5, Gemma 4 | `experts.gate_up_proj`, [experts, 2·inner, hidden] | `experts.down_proj`, [experts, hidden, inner] |
//! | Llama 4, Qwen3-VL | the same names, [experts, hidden, 2·inner] | [experts, inner, hidden] |
//! | Granite | `block_sparse_moe.input_linear.weight`, as transformers 5 | `….output_linear.weight` |
//! | Step | `moe.gate_proj.weight` and `moe.up_proj.weight`, [experts, inner, hidden] | `moe.down_proj.weight` |
//!
//! Servers read each of these experts in NVFP4 as `experts.N.gate_proj`, `up_proj` and `down_proj`,
//! and so does ModelOpt write them.

use super::file::{Order, TensorInfo};
use super::folder::{Checkpoint, Located};
use super::outline::Outline;
use super::weight::{Stored, Weight};
use safetensors::Dtype;

/// The module of experts in one tensor, as servers call it, whatever the tensor's own name is.
pub(super) fn experts(tensor: &Located<'_>) -> Option<String> {
    let float = matches!(tensor.info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32);
    let module = tensor.info.name.strip_suffix(".weight").unwrap_or(&tensor.info.name);
    let dimensions = tensor.info.shape.len();
    let parts: Vec<&str> = module.split('.').collect();
    if let Some(at) = parts.iter().position(|part| *part == "experts") {
        // DBRX's experts are stacked in two dimensions, `experts.mlp.w1`.
        let joined = dimensions == 3 || dimensions == 2 && parts.get(at + 1) == Some(&"mlp");
        return (float && joined).then(|| parts[..=at].join("."));
    }
    // Granite's `block_sparse_moe.input_linear` and Step's `moe.up_proj`: experts to a server.
    let (parent, _) = module.rsplit_once('.')?;
    (float && dimensions == 3 && parent.ends_with("moe")).then(|| format!("{parent}.experts"))
}

/// Whether a module belongs to an expert that has tensors of its own.
pub(super) fn is_expert(module: &str) -> bool {
    let number = module.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next());
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// A matrix of an expert as a weight.
pub(super) fn weight(tensor: Located<'_>) -> Weight<'_> {
    let module = tensor.info.name.strip_suffix(".weight").unwrap_or(&tensor.info.name).to_string();
    Weight { module, rows: tensor.info.shape[0], cols: tensor.info.shape[1], stored: Stored::Plain(tensor) }
}

/// Whether a name fits a tensor: its own, or that of a matrix of experts in it.
pub(super) fn is_named(checkpoint: &Checkpoint, tensor: &Located<'_>, fits: impl Fn(&str) -> bool) -> bool {
    let module = |info: &TensorInfo| fits(info.name.strip_suffix(".weight").unwrap_or(&info.name));
    module(tensor.info) || matrices(checkpoint, tensor).is_ok_and(|split| split.iter().any(module))
}

/// What a tensor of experts holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    GateAndUp,
    Gate,
    Up,
    Down,
}

const NAMES: [(&str, Holds); 6] = [
    ("gate_up_proj", Holds::GateAndUp),
    ("input_linear", Holds::GateAndUp),
    ("gate_proj", Holds::Gate),
    ("up_proj", Holds::Up),
    ("down_proj", Holds::Down),
    ("output_linear", Holds::Down),
];

/// Which of the two dimensions of an expert comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Outputs,
    Inputs,
}

/// The matrices that experts in one tensor consist of, as servers call them; or why the tensor
/// stays as it is.
pub(super) fn matrices(checkpoint: &Checkpoint, tensor: &Located<'_>) -> Result<Vec<TensorInfo>, String> {
    let Some(module) = experts(tensor) else { return Err("no experts".to_string()) };
    let config = checkpoint.config();
    let architecture = Outline::new(config).architecture().unwrap_or_default();
    if let Some((_, reason)) = UNREAD.iter().find(|(begins, _)| architecture.starts_with(begins)) {
        return Err(reason.to_string());
    }
    let name = tensor.info.name.as_str();
    let (front, end) = match name.strip_suffix(".weight") {
        Some(front) => (front, ".weight"),
        None => (name, ""),
    };
    let (parent, last) = front.rsplit_once('.').unwrap_or(("", front));
    let &[experts, a, b] = &tensor.info.shape[..] else {
        return Err("experts in one tensor of two dimensions are not quantized".to_string());
    };
    let Some((_, holds)) = NAMES.iter().find(|(named, _)| *named == last) else {
        return Err("experts in one tensor by a name that is not known".to_string());
    };
    if checkpoint.get(&format!("{name}_bias")).is_some() {
        return Err("experts in one tensor with biases, which no server reads in NVFP4".to_string());
    }
    // The shape of another tensor of the same experts.
    let shape = |wanted: &dyn Fn(Holds) -> bool| {
        let mut others = NAMES.iter().filter(|(_, holds)| wanted(*holds));
        let found = others.find_map(|(last, holds)| {
            checkpoint.get(&format!("{parent}.{last}{end}")).map(|tensor| (*holds, &tensor.info.shape[..]))
        });
        match found {
            Some((holds, &[count, a, b])) if count == experts => Some((holds, [a, b])),
            _ => None,
        }
    };
    let own = (*holds, [a, b]);
    let (inner, down) = match holds {
        Holds::Down => (shape(&|holds| holds != Holds::Down), Some(own)),
        _ => (Some(own), shape(&|holds| holds == Holds::Down)),
    };
    let (Some(inner), Some((_, down))) = (inner, down) else {
        return Err("experts in one tensor, without the other projections of the same experts".to_string());
    };
    let hidden = Outline::new(config).hidden().and_then(|n| usize::try_from(n).ok());
    let Some(first) = order(inner, down, hidden).filter(|_| experts * a * b > 0) else {
        return Err("experts in one tensor whose sizes do not fit each other".to_string());
    };
    let names: &[&str] = match holds {
        Holds::GateAndUp => &["gate_proj", "up_proj"],
        Holds::Gate => &["gate_proj"],
        Holds::Up => &["up_proj"],
        Holds::Down => &["down_proj"],
    };
    let size = tensor.info.dtype.bitsize() / 8;
    let (outputs, inputs) = if first == First::Outputs { (a, b) } else { (b, a) };
    let rows = outputs / names.len();
    let (skipped, order) = match first {
        First::Outputs => (rows * inputs * size, Order::Rows),
        First::Inputs => (rows * size, Order::Columns((outputs * size) as u64)),
    };
    let matrix = |expert: usize, i: usize| TensorInfo {
        name: format!("{module}.{expert}.{}.weight", names[i]),
        dtype: tensor.info.dtype,
        shape: vec![rows, inputs],
        start: tensor.info.start + (expert * a * b * size + i * skipped) as u64,
        len: (rows * inputs * size) as u64,
        order,
    };
    Ok((0..experts).flat_map(|expert| (0..names.len()).map(move |i| (expert, i))).map(|(e, i)| matrix(e, i)).collect())
}

/// Architectures whose experts servers read in one tensor only, and not in NVFP4.
const UNREAD: [(&str, &str); 3] = [
    ("GptOss", "vLLM 0.32 has no loader for GPT-OSS's experts in NVFP4"),
    ("Dbrx", "vLLM 0.32 has no loader for DBRX's experts in NVFP4"),
    ("Aria", "vLLM 0.32 has no loader for Aria's experts in NVFP4"),
];

/// Which dimension comes first, by what a projection makes and the next one takes.
fn order((holds, [a, b]): (Holds, [usize; 2]), [c, d]: [usize; 2], hidden: Option<usize>) -> Option<First> {
    match holds {
        Holds::GateAndUp if d.checked_mul(2) == Some(a) && b == c => Some(First::Outputs),
        Holds::GateAndUp if c.checked_mul(2) == Some(b) && a == d => Some(First::Inputs),
        // Both orders fit: the hidden size tells.
        Holds::Gate | Holds::Up if (a, b) == (d, c) => match hidden {
            Some(hidden) if hidden == a && hidden != b => Some(First::Inputs),
            _ => Some(First::Outputs),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_tell_the_order() {
        assert_eq!(order((Holds::GateAndUp, [64, 128]), [128, 32], None), Some(First::Outputs));
        assert_eq!(order((Holds::GateAndUp, [128, 64]), [32, 128], None), Some(First::Inputs));
        assert_eq!(order((Holds::GateAndUp, [128, 64]), [64, 128], None), None);
        assert_eq!(order((Holds::Up, [32, 128]), [128, 32], Some(128)), Some(First::Outputs));
        assert_eq!(order((Holds::Up, [128, 32]), [32, 128], Some(128)), Some(First::Inputs));
        assert_eq!(order((Holds::Up, [128, 32]), [64, 128], Some(128)), None);
    }
}
