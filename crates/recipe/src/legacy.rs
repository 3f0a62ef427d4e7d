//! TransformerEngine's words for roles, and the order of its slots, for comparisons with it.
//! Nothing else depends on this file.

use super::role::{AttentionSlot, Consumer, LinearSlot, Pass, Role, Slot};

/// A role in three texts, empty where TransformerEngine says nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LegacyRole {
    /// `linear`, `grouped_linear`, `dpa`, or the kind of a user's module.
    pub module_type: String,
    /// `input`, `weight`, `grad_output`, `qkv`, `s`, `do`, `dp`, or a user's slot.
    pub tensor_type: String,
    /// The module's path.
    pub name: String,
}

impl Role {
    /// TransformerEngine's words for this role, for comparisons with it.
    pub fn legacy(&self) -> LegacyRole {
        LegacyRole::of(self)
    }
}

impl LegacyRole {
    /// What is handed on is named for its first consumer. What nobody takes over has no role,
    /// except in attention, which gives a hint in the name alone.
    pub(super) fn of(role: &Role) -> Self {
        let site = match &role.consumer {
            Some(Consumer::Sites(sites)) if !sites.is_empty() => &sites[0],
            _ => &role.owner,
        };
        let name = site.path.to_string();
        let role = |module: &str, tensor: &str| LegacyRole {
            module_type: module.to_string(),
            tensor_type: tensor.to_string(),
            name: name.clone(),
        };
        let hint = |end: &str| LegacyRole {
            module_type: String::new(),
            tensor_type: String::new(),
            name: format!("{}.{end}", site.path),
        };
        match &site.slot {
            Slot::Linear(LinearSlot::Output | LinearSlot::GradInput) => role("", ""),
            Slot::Grouped { slot: LinearSlot::Output | LinearSlot::GradInput, .. } => role("", ""),
            Slot::Linear(slot) => role("linear", slot.name()),
            Slot::Grouped { slot, .. } => role("grouped_linear", slot.name()),
            Slot::Attention(AttentionSlot::O) => hint("dpa_output"),
            Slot::Attention(AttentionSlot::DQkv) => hint("dpa_grad_input"),
            Slot::Attention(slot) => role("dpa", slot.name()),
            Slot::Extension(slot) => role(slot.kind.as_str(), slot.slot.as_str()),
        }
    }
}

/// TransformerEngine's modules, as far as their slots are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegacyModule {
    /// `Linear` and `LayerNormLinear`.
    Linear,
    /// `LayerNormMLP`, which is two linear layers, `fc1` and `fc2`.
    LayerNormMlp,
    /// `GroupedLinear` with this many experts.
    GroupedLinear(u32),
    /// `ops.BasicLinear`, and `ops.GroupedLinear` with one entry per group.
    BasicLinear(u32),
    /// `DotProductAttention`.
    DotProductAttention,
}

/// Whether anything reads the quantizer at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Read {
    /// It is read.
    Always,
    /// It is read when the module hands the tensor on quantized.
    OnHandOver,
    /// It is made and never read; here there is no such slot.
    Never,
}

/// A position in TransformerEngine's list of quantizers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LegacySlot {
    /// The module inside the module, empty for the module itself.
    pub part: &'static str,
    /// The tensor.
    pub slot: Slot,
    /// Whether it is read.
    pub read: Read,
}

impl LegacyModule {
    /// The quantizers of one pass, in TransformerEngine's order.
    pub fn order(self, pass: Pass) -> Vec<LegacySlot> {
        use LinearSlot::*;
        use Read::*;
        let at = |part, slot: Slot, read| LegacySlot { part, slot, read };
        let linear = |part, slot: LinearSlot, read| at(part, slot.into(), read);
        let attention = |slot: AttentionSlot, read| at("", slot.into(), read);
        match (self, pass) {
            (LegacyModule::Linear, Pass::Forward) => {
                vec![linear("", Input, Always), linear("", Weight, Always), linear("", Output, OnHandOver)]
            }
            (LegacyModule::Linear, Pass::Backward) => {
                vec![linear("", GradOutput, Always), linear("", GradInput, OnHandOver)]
            }
            (LegacyModule::LayerNormMlp, Pass::Forward) => vec![
                linear("fc1", Input, Always),
                linear("fc1", Weight, Always),
                linear("fc2", Input, Never), // the output of fc1, named for its consumer
                linear("fc2", Input, Always),
                linear("fc2", Weight, Always),
                linear("fc2", Output, OnHandOver),
            ],
            (LegacyModule::LayerNormMlp, Pass::Backward) => vec![
                linear("fc1", GradOutput, Always),
                linear("fc1", GradInput, Never),
                linear("fc2", GradOutput, Always),
                linear("fc1", GradOutput, Never), // the input's gradient of fc2, named for its consumer
            ],
            (LegacyModule::GroupedLinear(experts), pass) => {
                let slots: &[(LinearSlot, Read)] = match pass {
                    Pass::Forward => &[(Input, Always), (Weight, Always), (Output, Never)],
                    Pass::Backward => &[(GradOutput, Always), (GradInput, Never)],
                };
                let of = |expert| move |&(slot, read)| at("", Slot::Grouped { slot, expert }, read);
                (0..experts).flat_map(|expert| slots.iter().map(of(expert))).collect()
            }
            (LegacyModule::BasicLinear(groups), pass) => {
                let slots: &[LinearSlot] = match pass {
                    Pass::Forward => &[Input, Weight],
                    Pass::Backward => &[GradOutput],
                };
                (0..groups).flat_map(|_| slots.iter().map(|&slot| linear("", slot, Always))).collect()
            }
            (LegacyModule::DotProductAttention, Pass::Forward) => {
                use AttentionSlot::*;
                let read = [(Qkv, Never), (Qkv, Never), (Qkv, Always), (O, Always), (O, Never), (O, Never)];
                let s = [(S, Never), (S, Never), (S, Always)];
                read.into_iter().chain(s).map(|(slot, read)| attention(slot, read)).collect()
            }
            (LegacyModule::DotProductAttention, Pass::Backward) => {
                use AttentionSlot::*;
                let read = [(DQkv, Always), (DQkv, Never), (DO, Never), (DO, Always), (DP, Never), (DP, Always)];
                read.into_iter().map(|(slot, read)| attention(slot, read)).collect()
            }
        }
    }
}
