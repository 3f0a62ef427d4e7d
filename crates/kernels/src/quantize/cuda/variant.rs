//! The variants of the kernels: one text for each combination of settings.

use super::super::Layout;
use super::{BLOCK_TEXT, advance_source};
use crate::Result;
use crate::amax::cuda::MOST_PARTS;
use crate::cuda::text::{ELEMENTS, PRECISIONS, TOKENS, Variants, WEIGHTS, assemble, precision};
use crate::cuda::{self, Device, GROUPS, Kernel, Source};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::OFFSETS_PER_CALL;
use nvfp4_spec::{Metric, Precision, Profile, Specials, Tile};

/// Threads of a group, but for the kernel over whole rows.
pub(super) const THREADS: u32 = 128;

/// The settings of a direction that kernels have as constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Settings {
    pub tile: Tile,
    pub rule: Rule,
    pub specials: Specials,
    pub profile: Profile,
    pub layout: Layout,
    pub stochastic: bool,
    pub transform: Transform,
    /// Whether values are written instead of codes.
    pub values: bool,
}

/// How a kernel chooses scales; 4over6 has its error path and its bound as parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    Six,
    FourOverSix(Metric),
    Mse,
    ModelOptMse,
    ModelOptFourOverSix,
}

/// The Hadamard transform in a kernel: the usual signs are constants, others are parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Transform {
    None,
    Constant(Signs),
    Passed,
}

impl Settings {
    /// 1×16 tiles of TransformerEngine, the rule "six", rounded to nearest.
    const PLAIN: Settings = Settings {
        tile: Tile::Row16,
        rule: Rule::Six,
        specials: Specials::Kernel,
        profile: Profile::TransformerEngine,
        layout: Layout::Linear,
        stochastic: false,
        transform: Transform::None,
        values: false,
    };

    /// Whether memory bandwidth, not arithmetic, is the bottleneck.
    pub fn is_light(self) -> bool {
        self.rule == Rule::Six && !self.stochastic && self.transform == Transform::None
    }

    /// A type with the settings of a direction, which may be absent.
    fn text(name: &str, settings: Option<Settings>) -> String {
        let s = settings.unwrap_or(Settings::PLAIN);
        let rule = match s.rule {
            Rule::Six => "SIX",
            Rule::FourOverSix(Metric::Mae) => "FOUR_OVER_SIX_MAE",
            Rule::FourOverSix(Metric::Mse) => "FOUR_OVER_SIX_MSE",
            Rule::Mse => "LEAST_SQUARES",
            Rule::ModelOptMse => "MODEL_OPT_SWEEP",
            Rule::ModelOptFourOverSix => "MODEL_OPT_FOUR_OVER_SIX",
        };
        let specials = match s.specials {
            Specials::Kernel => "KERNEL",
            Specials::Reference => "REFERENCE",
        };
        let profile = match s.profile {
            Profile::TransformerEngine => "TRANSFORMER_ENGINE",
            Profile::ModelOpt => "MODEL_OPT",
            Profile::LlmCompressor => "LLM_COMPRESSOR",
            Profile::TorchAo => "TORCH_AO",
        };
        format!(
            "struct {name} {{\n    static constexpr bool WANTED = {}, SQUARE = {}, STOCHASTIC = {}, TRANSFORM = {}, SWIZZLED = {}, VALUES = {};\n    \
             static constexpr int SIGNS = {};\n    static constexpr ScaleRule RULE_OF = {rule};\n    static constexpr Specials SPECIALS = {specials};\n    \
             static constexpr Profile PROFILE = {profile};\n}};\n",
            settings.is_some(),
            s.tile == Tile::Square16,
            s.stochastic,
            s.transform != Transform::None,
            s.layout == Layout::Swizzled,
            s.values,
            match s.transform {
                Transform::Constant(signs) => i32::from(signs.0),
                Transform::None | Transform::Passed => -1,
            },
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub function: Function,
    pub precision: Precision,
    pub row: Option<Settings>,
    pub col: Option<Settings>,
    pub whole: bool,
    /// Whether the matrix is one row of whole blocks under one amax.
    pub flat: bool,
    /// Whether all panels lie within the matrix.
    pub full: bool,
    /// Whether the rows of the matrix are in groups.
    pub grouped: bool,
    /// Blocks that a thread has at a time, where that is a choice.
    pub per_thread: u32,
    /// The most threads of a group.
    pub threads: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Function {
    Rows,
    WholeRows,
    Squares,
    Panels,
    FullPanels,
}

impl Variant {
    fn source(self) -> (&'static str, &'static str, String) {
        const MATRIX: &str = include_str!("matrix.cuh");
        const PANEL: &str = include_str!("panel.cuh");
        const SQUARES: &str = include_str!("squares.cuh");
        let settings = format!(
            "constexpr bool WHOLE = {}, FLAT = {}, FULL = {}, GROUPED = {};\nconstexpr unsigned OFFSETS_PER_CALL = {OFFSETS_PER_CALL};\n\
             constexpr Precision INPUT = {}, MATH = BF16;\nconstexpr int PER_THREAD = {}, MOST_THREADS = {}, MIN_BLOCKS = {};\nconstexpr unsigned MOST_PARTS = {MOST_PARTS};\n{}{}",
            self.whole,
            self.flat,
            self.full,
            self.grouped,
            precision(self.precision),
            self.per_thread,
            self.threads,
            self.min_blocks(),
            Settings::text("Row", self.row),
            Settings::text("Col", self.col),
        );
        let files = |own: &[&'static str]| [&[ELEMENTS, WEIGHTS, TOKENS, BLOCK_TEXT, GROUPS, MATRIX], own].concat();
        let (function, files) = match self.function {
            Function::Rows => ("quantize_rows", files(&[include_str!("rows.cu")])),
            Function::WholeRows => ("quantize_whole_rows", files(&[include_str!("whole_rows.cu")])),
            Function::Squares => ("quantize_squares", files(&[SQUARES, include_str!("squares.cu")])),
            Function::Panels => ("quantize_panels", files(&[PANEL, SQUARES, include_str!("panels.cu")])),
            Function::FullPanels => ("quantize_full_panels", files(&[PANEL, include_str!("full_panels.cu")])),
        };
        ("quantize", function, assemble(&settings, &files))
    }

    /// How many groups of threads a multiprocessor should hold at a time, which limits registers.
    /// Measured; docs/gpu.md.
    fn min_blocks(self) -> u32 {
        let filtered = [self.row, self.col].into_iter().flatten().any(|s| s.rule != Rule::Six);
        // Twice the threads have twice the registers.
        let of_usual = match (self.function, self.precision, filtered) {
            (Function::WholeRows, ..) => return 1,
            (_, Precision::F32, _) => 4,
            (Function::Rows, _, true) if self.flat => 7,
            (Function::Panels, ..) | (_, _, true) => 6,
            (Function::Rows, ..) if self.per_thread > 1 => 6,
            (Function::Rows, ..) if self.flat && self.row.is_some_and(|s| s.transform == Transform::None) => 10,
            (Function::Rows | Function::Squares | Function::FullPanels, ..) => 8,
        };
        of_usual * THREADS / self.threads
    }

    pub fn kernel(self, device: Device) -> Result<Kernel> {
        static VARIANTS: Variants<Variant> = Variants::new();
        Ok(VARIANTS.get(device, self, Variant::source)?)
    }
}

/// Texts for [`crate::sources`]: every setting in every function. Types, whole or ragged, and the
/// directions of a panel alternate.
pub(crate) fn sources() -> Vec<(String, Source)> {
    let plain = Settings::PLAIN;
    let profile = |profile| Settings { profile, ..plain };
    let settings = [
        plain,
        Settings { specials: Specials::Reference, ..plain },
        Settings { stochastic: true, ..plain },
        Settings { stochastic: true, transform: Transform::Passed, specials: Specials::Reference, ..plain },
        Settings { rule: Rule::FourOverSix(Metric::Mae), ..plain },
        Settings { rule: Rule::FourOverSix(Metric::Mse), specials: Specials::Reference, ..plain },
        Settings { rule: Rule::FourOverSix(Metric::Mse), transform: Transform::Constant(Signs::FIXED), ..plain },
        profile(Profile::ModelOpt),
        Settings { rule: Rule::Mse, ..profile(Profile::ModelOpt) },
        Settings { rule: Rule::ModelOptMse, ..profile(Profile::ModelOpt) },
        Settings { rule: Rule::ModelOptFourOverSix, ..profile(Profile::ModelOpt) },
        Settings { stochastic: true, ..profile(Profile::LlmCompressor) },
        Settings { transform: Transform::Constant(Signs::NONE), ..profile(Profile::TorchAo) },
    ];
    // The second and the seventh, which no variant has flat.
    let mut settings = settings;
    settings.iter_mut().skip(1).step_by(5).for_each(|s| s.layout = Layout::Swizzled);
    let square = |s: Settings| Settings { tile: Tile::Square16, ..s };
    let mut all = vec![cuda::entry((), advance_source)];
    for (i, s) in settings.into_iter().enumerate() {
        // Every type comes whole and ragged within six variants.
        let variant = |function, n: usize, row, col| Variant {
            function,
            precision: PRECISIONS[(i + n) % 3],
            row,
            col,
            whole: (i + n).is_multiple_of(2),
            flat: false,
            full: function == Function::Panels && (i + n).is_multiple_of(4),
            grouped: false,
            per_thread: 4,
            threads: THREADS,
        };
        let (other, both) = (settings[(i + 3) % settings.len()], i.is_multiple_of(2));
        let rows = variant(Function::Rows, 0, Some(s), None);
        let (flat, light) = (i.is_multiple_of(4), s.is_light() && rows.precision != Precision::F32);
        let (per_thread, threads) = [(1, 128), (2, 1024), (4, 1024)][i % 3];
        let variants = [
            Variant { flat, per_thread: if light { 2 } else { 1 }, ..rows },
            Variant { per_thread, threads, ..variant(Function::WholeRows, 1, Some(s), None) },
            variant(Function::Squares, 2, Some(square(s)), None),
            variant(Function::Panels, 3, both.then_some(square(other)), Some(s)),
            variant(Function::Panels, 4, (!both).then_some(other), Some(square(s))),
            Variant {
                precision: PRECISIONS[1 + i % 2],
                whole: true,
                full: true,
                ..variant(Function::FullPanels, 5, both.then_some(other), Some(s))
            },
        ];
        // One function of each setting in groups.
        let grouped = variants[[0, 2, 3, 4, 5][i % 5]];
        // And values, with twice the threads, from either function of panels.
        let wide = Variant { threads: 2 * THREADS, ..variants[3 + i % 3] };
        let values = |s: Settings| Settings { values: true, layout: Layout::Linear, ..s };
        let values = Variant { row: wide.row.map(values), col: wide.col.map(values), whole: true, ..wide };
        let grouped = Variant {
            whole: true,
            flat: false,
            full: grouped.function == Function::FullPanels,
            grouped: true,
            ..grouped
        };
        all.extend(variants.into_iter().chain([wide, values, grouped]).map(|v| cuda::entry(v, Variant::source)));
    }
    all
}
