//! Where a tensor stands in a model, by its name.

/// Parts of names that lead to the layers of a text model.
const WORDS: [&str; 12] = [
    "model",
    "language_model",
    "transformer",
    "backbone",
    "gpt_neox",
    "decoder",
    "thinker",
    "llm",
    "text_model",
    "encoder",
    "bert",
    "roberta",
];

/// The last part of the name of a module that stands beside the layers of a text model.
pub(super) fn beside_layers(module: &str) -> Option<&str> {
    let (before, last) = module.rsplit_once('.').unwrap_or(("", module));
    (before.is_empty() || before.split('.').all(|part| WORDS.contains(&part))).then_some(last)
}

/// The prefix of a layer of the text model, its number, and what follows.
pub(super) fn layer_of(name: &str) -> Option<(&str, usize, &str)> {
    layer_of_any(name).filter(|(prefix, ..)| {
        let before = prefix.rsplit_once('.').map_or("", |(before, _)| before);
        before.is_empty() || before.split('.').all(|part| WORDS.contains(&part))
    })
}

/// The same of any model.
pub(super) fn layer_of_any(name: &str) -> Option<(&str, usize, &str)> {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len() + 1;
        if ["layers", "h", "blocks", "layer"].contains(&part) {
            let prefix = &name[..end - 1];
            return layer_below(prefix, name).map(|(layer, rest)| (prefix, layer, rest));
        }
    }
    None
}

/// The number of a layer with this prefix, and what follows.
pub(super) fn layer_below<'n>(prefix: &str, name: &'n str) -> Option<(usize, &'n str)> {
    let (number, rest) = name.strip_prefix(prefix)?.strip_prefix('.')?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

/// The kind of a tensor of a layer; `None` for scales, and for parts that only some layers of a
/// type have.
pub(super) fn kind_of(rest: &str) -> Option<String> {
    const SCALES: [&str; 6] = ["_scale", "_scale_2", "_scale_inv", "_scales", "inv_freq", "_bias"];
    let parts = rest.split('.');
    let sparse = |part: &str| part.starts_with("index") || part == "compressor";
    if SCALES.iter().any(|end| rest.ends_with(end)) || parts.clone().any(sparse) {
        return None;
    }
    let is_number = |part: &str| part.parse::<u64>().is_ok();
    // A number after a number is a place in a sequence, not one of several that are alike.
    let before = std::iter::once("").chain(parts.clone());
    let named = before.zip(parts).map(|(before, part)| if is_number(part) && !is_number(before) { "#" } else { part });
    let kind = named.collect::<Vec<&str>>().join(".");
    Some(kind.strip_suffix("_packed").map(str::to_string).unwrap_or(kind))
}

#[cfg(test)]
mod tests {
    use super::{kind_of, layer_of, layer_of_any};

    #[test]
    fn a_number_after_a_number_is_a_place() {
        assert_eq!(kind_of("mlp.experts.3.up_proj").as_deref(), Some("mlp.experts.#.up_proj"));
        assert_eq!(kind_of("adapter_list.3.1").as_deref(), Some("adapter_list.#.1"));
    }

    #[test]
    fn layers_are_found_below_the_prefix_of_an_encoder() {
        for prefix in ["bert.encoder.layer", "roberta.encoder.layer", "encoder.layer"] {
            let name = format!("{prefix}.1.output.dense.weight");
            assert_eq!(layer_of(&name), Some((prefix, 1, "output.dense.weight")));
        }
        let other = "electra.encoder.layer.1.output.dense.weight";
        assert_eq!(layer_of(other), None);
        assert_eq!(layer_of_any(other), Some(("electra.encoder.layer", 1, "output.dense.weight")));
    }
}
