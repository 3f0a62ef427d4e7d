//! Quantizers: settings in words, and tensors into quantized ones.

use crate::array::{Array, floats};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::delayed;
use crate::error::OrRaise;
use crate::generator::{Generator, offset};
use crate::held::Held;
use crate::place::Place;
use crate::tensor::QuantTensor;
use crate::threads;
use crate::words::{
    self, DIRECTIONS, FINITES, GLOBALS, LAYOUTS, PROFILES, ROUNDINGS, SCALE_RULES, SPECIALS, TILES, choose,
};
use nvfp4::format::{Format, Nvfp4, QuantSpec};
use nvfp4::{Elements, Options, Randomness, Side, Signs, Transform};
use nvfp4_spec::{BLOCK, hadamard};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::array;
use std::sync::Arc;

/// A checked set of choices that turns arrays into quantized tensors.
///
/// Settings are words. An unknown one is a ValueError that names the known ones; so is a
/// combination that has no meaning.
///
/// >>> import numpy, nvfp4
/// >>> weights = nvfp4.Quantizer(tile="16x16", directions="both")
/// >>> q = weights.quantize(numpy.ones((32, 64), numpy.float32))
/// >>> q.codes.shape, q.scales.shape, q.amax
/// ((32, 32), (32, 4), array([1.], dtype=float32))
///
/// Instead of settings, `spec` takes any format in recipe syntax: `Quantizer(spec="mxfp8 /
/// nvfp4(hadamard)", directions="both")`.
#[pyclass(frozen, module = "nvfp4", eq)]
#[derive(PartialEq)]
pub struct Quantizer {
    spec: QuantSpec,
    maker: nvfp4::Quantizer,
}

impl Quantizer {
    /// A quantizer that was made elsewhere, as a plan does.
    pub fn from_parts(spec: QuantSpec, maker: nvfp4::Quantizer) -> Self {
        Quantizer { spec, maker }
    }

    /// The tensor of an array, and the amaxes that delayed scaling is to remember.
    fn make<'py>(&self, x: &Bound<'py, PyAny>, call: Call<'_, 'py>) -> PyResult<(QuantTensor, [Option<Seen<'py>>; 2])> {
        let array = Array::of(x)?;
        [&call.amax, &call.column_amax].into_iter().flatten().try_for_each(check_amax)?;
        delayed::check_scales(&self.spec, call.scale.is_some(), call.column_scale.is_some())?;
        let randomness = randomness(x.py(), call.seed, call.offset.clone(), call.generator)?;
        let (held, seen) = match array.place {
            Place::Host if call.watch.is_some() => {
                return Err(PyValueError::new_err("`watch` is for tensors on a GPU; on the CPU, say finite='refuse'"));
            }
            Place::Host => self.on_host(x.py(), &array, randomness, call)?,
            #[cfg(feature = "cuda")]
            Place::Cuda(id) => {
                if let Some(found) = &call.watch {
                    cuda::watch(x, &array, id, found)?;
                }
                let Call { amax, column_amax, scale, column_scale, .. } = call;
                let given = cuda::Given { seed: randomness, amax, column_amax, scale, column_scale };
                let (held, seen) = cuda::quantize(x.py(), &self.maker, &array, id, given)?;
                (Held::Cuda(Arc::new(held)), seen)
            }
        };
        Ok((QuantTensor::new(held, array.framework), seen))
    }

    fn on_host<'py>(
        &self,
        py: Python<'py>,
        array: &Array,
        randomness: Option<(u64, Bound<'py, PyAny>)>,
        call: Call<'_, 'py>,
    ) -> PyResult<(Held, [Option<Seen<'py>>; 2])> {
        let randomness = match randomness {
            Some((seed, at)) => Some(Randomness::At { seed, offset: offset(&at)? }),
            None => None,
        };
        let numbers = |amax: Option<Bound<'_, PyAny>>| amax.map(|amax| floats(&amax)).transpose();
        let (row_amax, col_amax) = (numbers(call.amax)?, numbers(call.column_amax)?);
        let (row_amax, col_amax) = (row_amax.as_deref(), col_amax.as_deref());
        let options = Options { randomness, row_amax, col_amax, ..Options::default() };
        let input = array.tensor_ref()?;
        let maker = self.with_scales(call.scale.as_ref(), call.column_scale.as_ref())?;
        let made = threads::run(py, || maker.observe(&input, &options))?.or_raise()?;
        let seen =
            |amax: Option<f32>| amax.map(|amax| array.framework.owned(py, Elements::F32(vec![amax]), &[1])).transpose();
        Ok((Held::Host(Arc::new(made.tensor)), [seen(made.row_amax)?, seen(made.col_amax)?]))
    }

    /// The quantizer with the scales that delayed scaling has at this call; they begin at 1.
    fn with_scales(
        &self,
        scale: Option<&Bound<'_, PyAny>>,
        column_scale: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<nvfp4::Quantizer> {
        if scale.is_none() && column_scale.is_none() {
            return Ok(self.maker);
        }
        let one = |scale: Option<&Bound<'_, PyAny>>| match scale.map(floats).transpose()?.as_deref() {
            None => Ok(1.0),
            Some([scale]) => Ok(*scale),
            Some(all) => Err(PyValueError::new_err(format!("expected one scale, got {}", all.len()))),
        };
        let (scale, column_scale) = (one(scale)?, one(column_scale)?);
        let of = |side| match (&self.spec, side) {
            (QuantSpec::Split(_), Side::Column) => column_scale,
            _ => scale,
        };
        let maker =
            nvfp4::Quantizer::with_scales(&self.spec, self.maker.directions(), |side| Some(of(side))).or_raise()?;
        Ok(maker.with_finite(self.maker.finite()))
    }
}

/// An error for NaN, which is no magnitude. What lies on a GPU is not looked at.
fn check_amax(amax: &Bound<'_, PyAny>) -> PyResult<()> {
    let on_gpu = amax.getattr("is_cuda").and_then(|there| there.extract()).unwrap_or(false);
    if !on_gpu && floats(amax)?.iter().any(|amax| amax.is_nan()) {
        return Err(PyValueError::new_err("amax: expected a magnitude, got NaN"));
    }
    Ok(())
}

/// An amax that was seen, an array of one number.
type Seen<'py> = Bound<'py, PyAny>;

/// What a call gives beside the array.
struct Call<'a, 'py> {
    seed: Option<u64>,
    offset: Option<Bound<'py, PyAny>>,
    generator: Option<&'a Generator>,
    amax: Option<Bound<'py, PyAny>>,
    column_amax: Option<Bound<'py, PyAny>>,
    scale: Option<Bound<'py, PyAny>>,
    column_scale: Option<Bound<'py, PyAny>>,
    watch: Option<Bound<'py, PyAny>>,
}

/// The seed and the offset of a call, if codes are drawn.
fn randomness<'py>(
    py: Python<'py>,
    seed: Option<u64>,
    offset: Option<Bound<'py, PyAny>>,
    generator: Option<&Generator>,
) -> PyResult<Option<(u64, Bound<'py, PyAny>)>> {
    match (seed, offset, generator) {
        (None, None, None) => Ok(None),
        (None, None, Some(generator)) => {
            let (seed, offset) = generator.draw()?;
            Ok(Some((seed, offset.into_pyobject(py)?.into_any())))
        }
        (Some(seed), None, None) => Ok(Some((seed, 0u64.into_pyobject(py)?.into_any()))),
        (Some(seed), Some(offset), None) => Ok(Some((seed, offset))),
        (None, Some(_), None) => Err(PyValueError::new_err("`offset` without `seed`: give both, or a `generator`")),
        (_, _, Some(_)) => Err(PyValueError::new_err("give `seed` and `offset`, or a `generator`, not both")),
    }
}

#[pymethods]
impl Quantizer {
    #[new]
    #[pyo3(signature = (*, tile="1x16", global_scale="per-tensor", scale_rule="six", rounding="nearest", transform=None,
                        directions="row", specials="kernel", profile="transformer-engine", layout="linear", finite="keep",
                        spec=None))]
    #[allow(clippy::too_many_arguments)] // each is a setting with a name
    fn new(
        tile: &str,
        global_scale: &str,
        scale_rule: &str,
        rounding: &str,
        transform: Option<Bound<'_, PyAny>>,
        directions: &str,
        specials: &str,
        profile: &str,
        layout: &str,
        finite: &str,
        spec: Option<&str>,
    ) -> PyResult<Self> {
        let directions = choose("directions", DIRECTIONS, directions)?;
        let finite = choose("finite", FINITES, finite)?;
        let settings = nvfp4::Quantizer::builder()
            .tile(choose("tile", TILES, tile)?)
            .global_scale(choose("global_scale", GLOBALS, global_scale)?)
            .scale_rule(choose("scale_rule", SCALE_RULES, scale_rule)?)
            .rounding(choose("rounding", ROUNDINGS, rounding)?)
            .transform(self::transform(transform)?)
            .specials(choose("specials", SPECIALS, specials)?)
            .profile(choose("profile", PROFILES, profile)?)
            .layout(choose("layout", LAYOUTS, layout)?);
        let spec = match spec {
            None => {
                settings.directions(directions).build().or_raise()?;
                QuantSpec::Uniform(Format::Nvfp4(Nvfp4::new(settings).or_raise()?))
            }
            Some(spec) if settings == nvfp4::Quantizer::builder() => spec.parse().or_raise()?,
            Some(_) => {
                return Err(PyValueError::new_err(
                    "`spec` has all settings but `directions` and `finite`; leave the others out",
                ));
            }
        };
        let maker = nvfp4::Quantizer::with_scales(&spec, directions, |_| Some(1.0)).or_raise()?;
        Ok(Quantizer { spec, maker: maker.with_finite(finite) })
    }

    /// Quantizes an array of float32, bfloat16 or float16: numpy's, torch's, or anything else with
    /// DLPack.
    ///
    /// Stochastic rounding draws from (seed, offset, position) alone, so that the same call gives
    /// the same bytes on every machine; a generator hands out offsets that do not overlap. A known
    /// amax, one number or one per row, is taken as it is: float32, or a number of another type
    /// that float32 has exactly; a number of Python is rounded to float32.
    ///
    /// Delayed scaling takes the `scale` that earlier steps led to, 1 if there is none, and
    /// `column_scale` where the column direction has one of its own; see `Delayed`.
    ///
    /// `watch`, for tensors on a GPU: one int64 there that holds -1. The first NaN or infinity of
    /// `x` is left in it without waiting, as four times its index plus 0 for infinity, 1 for its
    /// negative and 2 for NaN.
    #[pyo3(signature = (x, *, seed=None, offset=None, generator=None, amax=None, column_amax=None, scale=None, column_scale=None, watch=None))]
    #[allow(clippy::too_many_arguments)]
    fn quantize<'py>(
        &self,
        x: &Bound<'py, PyAny>,
        seed: Option<u64>,
        offset: Option<Bound<'py, PyAny>>,
        generator: Option<&Generator>,
        amax: Option<Bound<'py, PyAny>>,
        column_amax: Option<Bound<'py, PyAny>>,
        scale: Option<Bound<'py, PyAny>>,
        column_scale: Option<Bound<'py, PyAny>>,
        watch: Option<Bound<'py, PyAny>>,
    ) -> PyResult<QuantTensor> {
        Ok(self.make(x, Call { seed, offset, generator, amax, column_amax, scale, column_scale, watch })?.0)
    }

    /// Quantizes an array, and gives what delayed scaling is to remember of it: (tensor, amax,
    /// column_amax). An amax is an array of one number, or None for a direction whose scale does
    /// not come from earlier steps.
    #[pyo3(signature = (x, *, seed=None, offset=None, generator=None, amax=None, column_amax=None, scale=None, column_scale=None, watch=None))]
    #[allow(clippy::too_many_arguments)]
    fn observe<'py>(
        &self,
        x: &Bound<'py, PyAny>,
        seed: Option<u64>,
        offset: Option<Bound<'py, PyAny>>,
        generator: Option<&Generator>,
        amax: Option<Bound<'py, PyAny>>,
        column_amax: Option<Bound<'py, PyAny>>,
        scale: Option<Bound<'py, PyAny>>,
        column_scale: Option<Bound<'py, PyAny>>,
        watch: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(QuantTensor, Option<Seen<'py>>, Option<Seen<'py>>)> {
        let call = Call { seed, offset, generator, amax, column_amax, scale, column_scale, watch };
        let (tensor, [row, column]) = self.make(x, call)?;
        Ok((tensor, row, column))
    }

    /// Which directions are written: 'row', 'column' or 'both'.
    #[getter]
    fn directions(&self) -> &'static str {
        words::word(DIRECTIONS, self.maker.directions())
    }

    /// 'nearest' or 'stochastic'.
    #[getter]
    fn rounding(&self) -> &'static str {
        words::word(ROUNDINGS, self.maker.rounding())
    }

    /// What is done about NaN and infinities: 'keep' or 'refuse'.
    #[getter]
    fn finite(&self) -> &'static str {
        words::word(FINITES, self.maker.finite())
    }

    /// The settings as recipes write them: `Quantizer(spec=q.spec, directions=q.directions,
    /// finite=q.finite) == q`.
    #[getter]
    fn spec(&self) -> String {
        self.spec.to_string()
    }

    /// What a pickle keeps: the settings.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let settings = PyDict::new(py);
        settings.set_item("spec", self.spec())?;
        settings.set_item("directions", self.directions())?;
        settings.set_item("finite", self.finite())?;
        Ok((PyTuple::empty(py), settings))
    }

    fn __call__(&self, x: &Bound<'_, PyAny>) -> PyResult<QuantTensor> {
        self.quantize(x, None, None, None, None, None, None, None, None)
    }

    fn __repr__(&self) -> String {
        let finite = if self.finite() == "keep" { "" } else { ", finite='refuse'" };
        format!("Quantizer(spec='{}', directions='{}'{finite})", self.spec, self.directions())
    }
}

/// `None`, `"none"`, `"hadamard"`, or the 16 signs as a number.
fn transform(transform: Option<Bound<'_, PyAny>>) -> PyResult<Transform> {
    const TRANSFORMS: words::Words<Transform> = &[("none", Transform::None), ("hadamard", Transform::FixedSigns)];
    let Some(transform) = transform else { return Ok(Transform::None) };
    match (transform.extract::<String>(), transform.extract::<u16>()) {
        (Ok(word), _) => choose("transform", TRANSFORMS, &word),
        (_, Ok(signs)) => Ok(Transform::Signs(Signs(signs))),
        _ => Err(PyTypeError::new_err("expected None, 'hadamard' or 16 signs as a number from 0 to 65535")),
    }
}

/// The matrix that the Hadamard transform with these signs multiplies 16 values by, row by row.
#[pyfunction(name = "_hadamard_matrix")]
pub fn hadamard_matrix(signs: u16) -> [[f32; BLOCK]; BLOCK] {
    array::from_fn(|i| {
        let unit = array::from_fn(|k| f32::from(u8::from(k == i)));
        hadamard::transform(unit, Signs(signs))
    })
}
