//! What a plan needs to know of a model: its modules, which tensors they quantize, and which are
//! handed over quantized.

use super::consumers::Use;
use super::path::ModulePath;
use super::products::Product;
use super::role::{AttentionSlot, Consumer, ExtensionSlot, LinearSlot, Pass, Role, Site, Slot};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

/// A model, as far as quantization goes.
///
/// ```
/// use nvfp4_recipe::{Model, Module};
///
/// let mut model = Model::new();
/// model.add(Module::linear("mlp.fc1")).add(Module::linear("mlp.fc2"));
/// assert_eq!(model.roles().len(), 6, "input, weight and output gradient of each");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub(super) modules: Vec<Module>,
    pub(super) edges: Vec<Edge>,
    pub(super) purpose: Purpose,
}

/// What a model is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Purpose {
    /// Both passes.
    #[default]
    Training,
    /// The forward pass alone: gradients have no slots.
    Inference,
}

/// A tensor that is handed over quantized: the consumers take its codes as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// What its module hands on.
    pub from: Site,
    /// Who takes it; none means something outside the model.
    pub to: Vec<Site>,
}

impl Edge {
    /// From one module to others.
    pub fn new(from: Site, to: impl IntoIterator<Item = Site>) -> Self {
        Edge { from, to: to.into_iter().collect() }
    }

    /// To something outside the model.
    pub fn outside(from: Site) -> Self {
        Edge { from, to: Vec::new() }
    }
}

/// Something that consists of modules: all that the author of a layer writes. Roles are made from
/// it.
pub trait Quantizable {
    /// Adds the modules, under a path, and the edges between them.
    fn declare(&self, path: &ModulePath, model: &mut Model);
}

/// A module with tensors to quantize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    pub(super) path: ModulePath,
    pub(super) kind: Kind,
    pub(super) slots: Vec<ExtensionSlot>,
    pub(super) products: Vec<Product>,
    pub(super) uses: Vec<(Slot, Use)>,
    pub(super) input: KeepInput,
    pub(super) weight: WeightStorage,
    pub(super) alignment: Option<NonZeroUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Linear,
    Grouped { experts: u32 },
    Attention,
    Extension,
}

/// What a linear layer should keep of its input for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum KeepInput {
    /// The codes that the backward pass reads.
    #[default]
    Quantized,
    /// The input itself, quantized again in the backward pass; a spec for which that gives other
    /// bytes is refused.
    Original,
    /// The same, but with such a spec the codes are kept, and the plan has a warning.
    PreferOriginal,
}

/// How a module's weights exist between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum WeightStorage {
    /// In high precision; codes are made from them.
    #[default]
    HighPrecision,
    /// As codes alone.
    Quantized,
}

impl Module {
    fn new(path: impl Into<ModulePath>, kind: Kind) -> Self {
        Module {
            path: path.into(),
            kind,
            slots: Vec::new(),
            products: Vec::new(),
            uses: Vec::new(),
            input: KeepInput::Quantized,
            weight: WeightStorage::HighPrecision,
            alignment: None,
        }
    }

    /// A linear layer, with or without a norm before it.
    pub fn linear(path: impl Into<ModulePath>) -> Self {
        Module::new(path, Kind::Linear)
    }

    /// Linear layers that are computed together, one per expert.
    pub fn grouped_linear(path: impl Into<ModulePath>, experts: u32) -> Self {
        Module::new(path, Kind::Grouped { experts })
    }

    /// The products and the softmax of attention, without the linear layers around them.
    pub fn attention(path: impl Into<ModulePath>) -> Self {
        Module::new(path, Kind::Attention)
    }

    /// A module that this library does not know. Its tensors and products come with
    /// [`Module::slot`] and [`Module::product`].
    pub fn extension(path: impl Into<ModulePath>) -> Self {
        Module::new(path, Kind::Extension)
    }

    /// Adds a tensor that this library does not know.
    pub fn slot(mut self, slot: ExtensionSlot) -> Self {
        self.slots.push(slot);
        self
    }

    /// Adds a product that this library does not know, so that its operands are checked against
    /// each other.
    pub fn product(mut self, product: Product) -> Self {
        self.products.push(product);
        self
    }

    /// Says that a tensor is used in a way that not every spec allows.
    pub fn used(mut self, slot: impl Into<Slot>, usage: Use) -> Self {
        self.uses.push((slot.into(), usage));
        self
    }

    /// What to keep of the input for the backward pass.
    pub fn keep_input(self, input: KeepInput) -> Self {
        Module { input, ..self }
    }

    /// How weights exist between steps.
    pub fn weight_storage(self, weight: WeightStorage) -> Self {
        Module { weight, ..self }
    }

    /// Pads tokens to a multiple of this many, whatever the formats ask for.
    pub fn align(self, tokens: NonZeroUsize) -> Self {
        Module { alignment: Some(tokens), ..self }
    }

    /// The module's path.
    pub fn path(&self) -> &ModulePath {
        &self.path
    }

    /// The tensors that the module quantizes whatever its neighbours are.
    pub(super) fn slots(&self) -> Vec<Slot> {
        use LinearSlot::*;
        let mut slots = match self.kind {
            Kind::Linear | Kind::Grouped { .. } => self.linear_slots(&[Input, Weight, GradOutput]),
            Kind::Attention => AttentionSlot::ALL.map(Slot::Attention).to_vec(),
            Kind::Extension => Vec::new(),
        };
        slots.extend(self.slots.iter().cloned().map(Slot::Extension));
        slots
    }

    /// The tensors that the module quantizes only to hand them over.
    pub(super) fn boundary_slots(&self) -> Vec<Slot> {
        self.linear_slots(&[LinearSlot::Output, LinearSlot::GradInput])
    }

    /// These tensors of a linear layer, or of each expert.
    fn linear_slots(&self, slots: &[LinearSlot]) -> Vec<Slot> {
        let slots = slots.iter().copied();
        match self.kind {
            Kind::Linear => slots.map(Slot::Linear).collect(),
            Kind::Grouped { experts } => {
                slots.flat_map(|slot| (0..experts).map(move |expert| Slot::Grouped { slot, expert })).collect()
            }
            Kind::Attention | Kind::Extension => Vec::new(),
        }
    }

    /// Whether an edge may start at a slot.
    pub(super) fn hands_on(&self, slot: &Slot) -> bool {
        match slot {
            Slot::Attention(slot) => {
                self.kind == Kind::Attention && matches!(slot, AttentionSlot::O | AttentionSlot::DQkv)
            }
            Slot::Extension(_) => self.slots().contains(slot),
            Slot::Linear(_) | Slot::Grouped { .. } => self.boundary_slots().contains(slot),
        }
    }

    /// The products inside the module.
    pub(super) fn products(&self, purpose: Purpose) -> Vec<Product> {
        let mut all: Vec<Product> = match self.kind {
            Kind::Linear => Product::of_linear(Slot::Linear).to_vec(),
            // All experts have the specs of the first.
            Kind::Grouped { .. } => Product::of_linear(|slot| Slot::Grouped { slot, expert: 0 }).to_vec(),
            Kind::Attention | Kind::Extension => Vec::new(),
        };
        all.extend(self.products.iter().cloned());
        let runs = |slot: &Slot| purpose == Purpose::Training || slot.pass() == Pass::Forward;
        all.into_iter().filter(|p| runs(&p.left.slot) && runs(&p.right.slot)).collect()
    }
}

impl Model {
    /// A model without modules, to be trained.
    pub fn new() -> Self {
        Model::default()
    }

    /// A model without modules, to be run forward alone.
    pub fn for_inference() -> Self {
        Model { purpose: Purpose::Inference, ..Model::default() }
    }

    /// Adds a module.
    pub fn add(&mut self, module: Module) -> &mut Self {
        self.modules.push(module);
        self
    }

    /// Adds all that something consists of.
    pub fn nest(&mut self, path: impl Into<ModulePath>, parts: &impl Quantizable) -> &mut Self {
        parts.declare(&path.into(), self);
        self
    }

    /// Hands a tensor over quantized.
    pub fn connect(&mut self, edge: Edge) -> &mut Self {
        self.edges.push(edge);
        self
    }

    /// The modules.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// The roles of all tensors that are quantized, module by module. A tensor that a linear layer
    /// could hand on has a role only if an edge asks for it; attention computes its output in the
    /// format of that slot in any case.
    pub fn roles(&self) -> Vec<Role> {
        let (mut roles, consumers) = (Vec::new(), self.consumers());
        for module in &self.modules {
            let site = |slot| Site { path: module.path.clone(), slot };
            for owner in module.slots().into_iter().map(site) {
                let consumer = consumers.get(&owner).cloned().or(match owner.slot {
                    Slot::Attention(AttentionSlot::O | AttentionSlot::DQkv) => Some(Consumer::HighPrecision),
                    _ => None,
                });
                roles.push(Role { owner, consumer });
            }
            for owner in module.boundary_slots().into_iter().map(site) {
                if let Some(consumer) = consumers.get(&owner).cloned() {
                    roles.push(Role { owner, consumer: Some(consumer) });
                }
            }
        }
        roles.retain(|role| self.purpose == Purpose::Training || role.pass() == Pass::Forward);
        roles
    }

    /// Who takes over each tensor that an edge says something about.
    fn consumers(&self) -> BTreeMap<&Site, Consumer> {
        let mut sites: BTreeMap<&Site, Vec<Site>> = BTreeMap::new();
        for edge in &self.edges {
            sites.entry(&edge.from).or_default().extend(edge.to.iter().cloned());
        }
        let consumer = |sites: Vec<Site>| if sites.is_empty() { Consumer::Unknown } else { Consumer::Sites(sites) };
        sites.into_iter().map(|(owner, sites)| (owner, consumer(sites))).collect()
    }
}
