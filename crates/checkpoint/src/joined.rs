//! Which weights a server joins into one matrix, and so reads with one tensor scale.

/// Weights beside each other that become one matrix in some server, by the last part of their
/// names.
struct Join {
    name: &'static str,
    members: &'static [&'static str],
    /// Weights that are joined with them in some models and stand alone in others. They share the
    /// scale where they are quantized too: that is never wrong.
    guests: &'static [&'static str],
}

const fn join(name: &'static str, members: &'static [&'static str]) -> Join {
    Join { name, members, guests: &[] }
}

/// Every join of vLLM's models (August 2026). A model that has only some of the names, such as
/// `q_proj` and `k_proj` without a `v_proj`, joins those.
const JOINS: [Join; 14] = [
    Join {
        name: "q/k/v",
        members: &["q_proj", "k_proj", "v_proj"],
        // OLMo Hybrid; Ling 3 and Kimi's linear attention; MiniMax M3's sparse attention.
        guests: &["g_proj", "b_proj", "f_a_proj", "index_q_proj", "index_k_proj"],
    },
    join("gate/up", &["gate_proj", "up_proj"]),
    join("w1/w3", &["w1", "w3"]),
    join("q_a/kv_a", &["q_a_proj", "kv_a_proj_with_mqa"]),
    // DeepSeek's own names; `wkv` and `wgate` are one where it compresses keys and values.
    Join { name: "wq_a/wkv_a", members: &["wq_a", "wkv_a_with_mqa", "wkv"], guests: &["wgate"] },
    join("query/key/value", &["query", "key", "value"]),
    // Molmo 2, and Mistral's own names.
    join("wq/wk/wv", &["wq", "wk", "wv"]),
    join("q/k/v", &["q", "k", "v"]),
    join("query/key/value", &["query_net", "key_net", "value_net"]),
    join("q/k/v/r", &["wq_du", "wk_dv", "wv_dv", "wr_du"]),
    // The linear attention of Qwen 3.5.
    join("qkv/z", &["in_proj_qkv", "in_proj_z"]),
    join("b/a", &["in_proj_b", "in_proj_a"]),
    // EXAONE 3.
    join("c_fc_0/c_fc_1", &["c_fc_0", "c_fc_1"]),
    // dots.ocr and Voxtral.
    join("fc1/fc3", &["fc1", "fc3"]),
];

/// The group that a module is fused in: what precedes its last name, and the group's name. Experts
/// have a number in what precedes, so each has its own group.
pub fn fused(module: &str) -> Option<(&str, &'static str)> {
    let (parent, last) = module.rsplit_once('.')?;
    let has = |join: &&Join| join.members.contains(&last) || join.guests.contains(&last);
    JOINS.iter().find(has).map(|join| (parent, join.name))
}

/// Whether a module is joined with others in some models only, so that it may be kept where they
/// are quantized.
pub(super) fn is_guest(module: &str) -> bool {
    let last = module.rsplit('.').next().unwrap_or(module);
    JOINS.iter().any(|join| join.guests.contains(&last))
}

/// The same by given lists of last names.
pub(super) fn listed<'m>(module: &'m str, lists: &[Vec<String>]) -> Option<(&'m str, String)> {
    let (parent, last) = module.rsplit_once('.')?;
    lists.iter().find(|list| list.iter().any(|name| name == last)).map(|list| (parent, list.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_have_groups_of_their_own() {
        assert_eq!(fused("l.0.self_attn.k_proj"), Some(("l.0.self_attn", "q/k/v")));
        assert_eq!(fused("l.0.mlp.experts.7.up_proj"), Some(("l.0.mlp.experts.7", "gate/up")));
        assert_eq!(fused("l.0.moe.experts.7.w3"), Some(("l.0.moe.experts.7", "w1/w3")));
        assert_eq!(fused("l.0.mlp.down_proj"), None);
    }

    /// A name in two joins would be found in the first only.
    #[test]
    fn a_name_is_in_one_join() {
        let mut names: Vec<&str> = JOINS.iter().flat_map(|j| j.members.iter().chain(j.guests)).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
