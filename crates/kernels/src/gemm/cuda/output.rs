//! From sums to outputs; `output.cuh` says how.

use super::global::Global;
use super::operand::{Operand, Weights};
use crate::cuda::text::precision;
use crate::cuda::{Plain, Slice, Values};
use nvfp4_spec::gemm::{Accumulator, Epilogue};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Element, GlobalScale, Precision};

/// Everything about a product but its operands. Twin of [`nvfp4_spec::gemm::Product`]; the GPU
/// chooses the order of additions.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a, T: Plain> {
    /// In what order the factors are applied; `None` picks row-scaled if either operand is.
    pub epilogue: Option<Epilogue>,
    /// How precisely the products of FP8 operands may be added.
    pub accumulator: Accumulator,
    /// The caller's factor α.
    pub alpha: f32,
    /// One value per output column, of any type.
    pub bias: Option<Values<'a>>,
    /// The matrix C and its factor β. A β of 0 leaves C unread.
    pub add: Option<(Slice<'a, T>, f32)>,
}

impl<T: Plain> Default for Product<'_, T> {
    fn default() -> Self {
        Product { epilogue: None, accumulator: Accumulator::Precise, alpha: 1.0, bias: None, add: None }
    }
}

/// The order of factors: twin of [`nvfp4_spec::gemm::OutputScale`]'s variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Order {
    Folded,
    OneRow,
    BothRows,
}

/// The settings of kernels that concern outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub precision: Precision,
    pub order: Order,
    /// The scale of the operand whose rows are tokens.
    pub tokens: GlobalScale,
    pub add: Add,
    pub operands: OperandOrder,
}

/// Which operand's rows are tokens to the tensor cores; the other's are weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum OperandOrder {
    /// The left one's.
    Given,
    /// The right one's.
    Swapped,
}

/// Whether there is a β·C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Add {
    Nothing,
    C,
}

impl Kind {
    /// bf16 outputs of given operands with one scale each, and nothing added.
    pub const PLAIN: Kind = Kind {
        precision: Precision::Bf16,
        order: Order::Folded,
        tokens: GlobalScale::PerTensor,
        add: Add::Nothing,
        operands: OperandOrder::Given,
    };

    /// The settings of `output.cuh`.
    pub fn settings(self) -> String {
        let order = match self.order {
            Order::Folded => "FOLDED",
            Order::OneRow => "ONE_ROW",
            Order::BothRows => "BOTH_ROWS",
        };
        let (output, add, rows) = (precision(self.precision), self.add == Add::C, self.tokens == GlobalScale::PerRow);
        let swapped = self.operands == OperandOrder::Swapped;
        format!(
            "constexpr Precision OUTPUT = {output};\nconstexpr Order ORDER = {order};\nconstexpr bool PER_TOKEN = {rows}, ADD = {add}, SWAPPED = {swapped};\n"
        )
    }
}

/// `Side` of `output.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Side {
    stored: u64,
    denominator: f32,
    divisor: u32,
    per_row: u32,
    step: u32,
}

impl Side {
    fn new(global: Global) -> Self {
        let (denominator, divisor) = match global.unit {
            Unit::Amax(bound) => (bound.six_e(), false),
            Unit::Multiplier => (1.0, false),
            Unit::Divisor => (1.0, true),
        };
        Side {
            stored: global.stored,
            denominator,
            divisor: divisor.into(),
            per_row: (global.of == GlobalScale::PerRow).into(),
            step: global.step,
        }
    }
}

impl Side {
    /// That of groups, a number for each.
    pub fn of_each(global: Global) -> Self {
        Side { per_row: 1, ..Side::new(global) }
    }
}

/// `Output` of `output.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Params {
    pub a: Side,
    pub b: Side,
    pub bias: u64,
    pub c: u64,
    pub out: u64,
    rows: u64,
    cols: u64,
    pub alpha: f32,
    pub beta: f32,
    pairs: u32,
    bias_type: u32,
}

const _: () = assert!(size_of::<Params>() == 104);

/// The outputs of a product.
pub(super) struct Output {
    pub kind: Kind,
    pub accumulator: Accumulator,
    /// The type of the bias, if there is one.
    bias: Option<Precision>,
    params: Params,
}

impl Output {
    pub fn new<T: Element + Plain>(a: &Operand<'_>, b: &Weights<'_>, product: &Product<'_, T>, out: u64) -> Self {
        let (left, right) = (a.global(), b.global());
        let row_scaled = [left, right].map(|side| side.of == GlobalScale::PerRow);
        let default = if row_scaled == [false; 2] { Epilogue::Folded } else { Epilogue::RowScaled };
        let order = match (product.epilogue.unwrap_or(default), row_scaled) {
            (Epilogue::Folded, _) => Order::Folded,
            (Epilogue::RowScaled, [true, true]) => Order::BothRows,
            (Epilogue::RowScaled, _) => Order::OneRow,
        };
        let add = product.add.filter(|&(_, beta)| beta != 0.0);
        let size = size_of::<T>();
        let pairs = b.rows().is_multiple_of(2) && out.is_multiple_of(2 * size as u64);
        let params = Params {
            a: Side::new(left),
            b: Side::new(right),
            bias: product.bias.map_or(0, |bias| bias.address()),
            c: add.map_or(0, |(c, _)| c.address()),
            out,
            rows: a.rows() as u64,
            cols: b.rows() as u64,
            alpha: product.alpha,
            beta: add.map_or(0.0, |(_, beta)| beta),
            pairs: pairs.into(),
            bias_type: product.bias.map_or(Precision::F32, |bias| bias.precision()) as u32,
        };
        let add = if add.is_some() { Add::C } else { Add::Nothing };
        let operands = OperandOrder::Given;
        let kind = Kind { precision: T::PRECISION, order, tokens: left.of, add, operands };
        let bias = product.bias.map(|bias| bias.precision());
        Output { kind, accumulator: product.accumulator, bias, params }
    }

    /// The same with so many columns: those of one group.
    pub fn with_columns(mut self, cols: usize) -> Self {
        let aligned = self.params.out.is_multiple_of(2 * self.size());
        self.params.cols = cols as u64;
        self.params.pairs = (cols.is_multiple_of(2) && aligned).into();
        self
    }

    /// N.
    pub fn columns(&self) -> usize {
        self.params.cols as usize
    }

    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The same with outputs of so many times the product.
    pub fn times(&self, factor: f32) -> Self {
        Output { params: Params { alpha: self.params.alpha * factor, ..self.params }, ..*self }
    }

    /// Whether there is no bias, or one in the type of the outputs.
    pub fn bias_fits(&self) -> bool {
        self.bias.is_none_or(|bias| bias == self.kind.precision)
    }

    /// Whether outputs and C start at multiples of so many bytes, and their rows too.
    pub fn aligned(&self, bytes: u64) -> bool {
        let pitch = self.params.cols * self.size();
        [self.params.out, self.params.c, pitch].iter().all(|at| at.is_multiple_of(bytes))
    }

    /// Bytes of an output.
    fn size(&self) -> u64 {
        match self.kind.precision {
            Precision::F32 => 4,
            Precision::Bf16 | Precision::F16 => 2,
        }
    }

    /// The same outputs with swapped operands: the right operand's rows are tokens.
    pub fn swapped(&self) -> Self {
        let tokens = if self.params.b.per_row == 1 { GlobalScale::PerRow } else { GlobalScale::PerTensor };
        Output { kind: Kind { tokens, operands: OperandOrder::Swapped, ..self.kind }, ..*self }
    }

    /// The parameters for the outputs of `rows` tokens from `first` on; with swapped operands, of
    /// all tokens.
    pub fn part(&self, first: usize, rows: usize) -> Params {
        let mut part = self.params;
        if self.kind.operands == OperandOrder::Swapped {
            return part;
        }
        let outputs = first as u64 * part.cols * self.size();
        part.out += outputs;
        part.c += if self.kind.add == Add::C { outputs } else { 0 };
        part.a.stored += if part.a.per_row == 1 { 4 * first as u64 } else { 0 };
        part.rows = rows as u64;
        part
    }
}
