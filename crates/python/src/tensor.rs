//! Quantized tensors and their directions.

use crate::array::{Array, Framework};
use crate::error::OrRaise;
use crate::held::Held;
use crate::matmul::{Operand, matmul};
use crate::part::{self, Part};
use crate::parts;
use crate::threads;
use crate::words::{self, DIRECTIONS, LAYOUTS, SIDES, choose};
use nvfp4::{Layout, Precision, Side, Unit};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use std::borrow::Cow;
use std::sync::Arc;

/// A quantized tensor: a shape and one or two directions, each with its codes and scales.
///
/// Arrays come back in the library that the input came from (`as_numpy()` and `as_torch()` choose
/// another): numpy's are read-only views, torch's are copies, since torch has no read-only tensors.
/// So nothing that is done to them changes the quantized tensor.
#[pyclass(frozen, module = "nvfp4")]
pub struct QuantTensor {
    /// The bytes.
    pub held: Held,
    framework: Framework,
}

/// One direction of a quantized tensor: the matrix, or for the column direction the transposed one,
/// quantized along its rows.
#[pyclass(frozen, module = "nvfp4")]
pub struct Direction {
    /// The tensor.
    pub held: Held,
    /// Which direction of it.
    pub side: Side,
    /// In whose arrays results come.
    pub framework: Framework,
}

/// What makes a tensor again, and its arguments: bytes, and whether arrays are torch's.
type Reduced<'py> = (Bound<'py, PyAny>, (Bound<'py, PyBytes>, bool));

impl QuantTensor {
    /// A tensor whose arrays are shown in a library.
    pub fn new(held: Held, framework: Framework) -> Self {
        QuantTensor { held, framework }
    }

    /// A tensor in the host's memory.
    pub fn on_host(tensor: nvfp4::QuantTensor, framework: Framework) -> Self {
        QuantTensor::new(Held::Host(Arc::new(tensor)), framework)
    }

    /// A direction that is there.
    pub fn side(&self, side: Side) -> PyResult<Direction> {
        self.held.size(side)?;
        Ok(Direction { held: self.held.clone(), side, framework: self.framework })
    }
}

impl Direction {
    /// Rows and columns.
    pub fn size(&self) -> (usize, usize) {
        self.held.size(self.side).expect("made for a direction that is there")
    }

    fn twin(&self) -> PyResult<Cow<'_, nvfp4::Direction>> {
        self.held.twin(self.side)
    }

    /// A part as callers may have it: it cannot be used to change the tensor.
    fn array<'py>(&self, py: Python<'py>, part: Part) -> PyResult<Bound<'py, PyAny>> {
        self.framework.unchangeable(self.framework.array(py, self.held.lend(self.side, part)?)?)
    }
}

/// A direction, the row direction of a quantized tensor, or an array.
impl<'py> FromPyObject<'_, 'py> for Operand {
    type Error = PyErr;

    fn extract(x: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let direction = |direction: &Direction| Operand::Quantized {
            held: direction.held.clone(),
            side: direction.side,
            framework: direction.framework,
        };
        if let Ok(x) = x.cast::<Direction>() {
            return Ok(direction(x.get()));
        }
        if let Ok(x) = x.cast::<QuantTensor>() {
            return Ok(direction(&x.get().side(Side::Row)?));
        }
        Ok(Operand::Plain(Array::of(&x)?))
    }
}

#[pymethods]
impl QuantTensor {
    /// A tensor of existing arrays, as `Direction.parts` gives them. `spec` is the text of its
    /// formats. Bytes in the host's memory are copied; arrays on a GPU are used where they lie, and
    /// must not be changed as long as the tensor is there.
    #[staticmethod]
    #[pyo3(signature = (spec, shape, *, row=None, column=None))]
    fn from_parts(
        spec: &str,
        shape: Vec<usize>,
        row: Option<Vec<Bound<'_, PyAny>>>,
        column: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<Self> {
        let first = row.iter().chain(&column).flatten().next();
        let framework = first.map_or(Ok(Framework::Numpy), Framework::of)?;
        Ok(QuantTensor::new(parts::put_together(spec, &shape, row, column)?, framework))
    }

    /// The shape of the tensor that was quantized.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.held.shape())
    }

    /// The row direction, or None.
    #[getter]
    fn row(&self) -> Option<Direction> {
        self.side(Side::Row).ok()
    }

    /// The column direction, the quantized transposed matrix, or None.
    #[getter]
    fn column(&self) -> Option<Direction> {
        self.side(Side::Column).ok()
    }

    /// The row direction's codes as bytes: in NVFP4 [rows, ceil(cols / 2)], the even element in the
    /// low nibble.
    #[getter]
    fn codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.side(Side::Row)?.codes(py)
    }

    /// The row direction's block scales: in NVFP4 E4M3 bytes, [rows, ceil(cols / 16)], or whole
    /// tiles of 128 × 4 if swizzled.
    #[getter]
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.side(Side::Row)?.scales(py)
    }

    /// The row direction's amax: one number, or one per row.
    #[getter]
    fn amax<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.side(Side::Row)?.amax(py)
    }

    /// Bytes that all directions take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.held.byte_len()
    }

    /// The same tensor with arrays of numpy.
    fn as_numpy(&self) -> Self {
        QuantTensor { held: self.held.clone(), framework: Framework::Numpy }
    }

    /// The same tensor with arrays of torch.
    fn as_torch(&self) -> Self {
        QuantTensor { held: self.held.clone(), framework: Framework::Torch }
    }

    /// The same tensor in the host's memory: itself, or a copy of one on a GPU, which is waited
    /// for.
    fn cpu(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(QuantTensor { held: self.held.to_host(py)?, framework: self.framework })
    }

    /// The decoded values. The column direction comes transposed, and rotated if the Hadamard
    /// transform was on.
    #[pyo3(signature = (dtype=None, *, side="row"))]
    pub fn dequantize<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        side: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let side = choose("side", SIDES, side)?;
        let direction = self.side(side)?;
        let shape = match side {
            Side::Row => self.held.shape().to_vec(),
            Side::Column => vec![direction.size().0, direction.size().1],
        };
        direction.decoded(py, dtype, &shape)
    }

    /// The product of the row directions: self · otherᵀ. `nvfp4.matmul` has more settings.
    #[pyo3(signature = (other, *, bias=None, dtype=None, accumulator="precise"))]
    fn matmul<'py>(
        slf: &Bound<'py, Self>,
        other: &Bound<'py, PyAny>,
        bias: Option<Bound<'py, PyAny>>,
        dtype: Option<Bound<'py, PyAny>>,
        accumulator: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        matmul(slf.py(), slf.as_any(), other, bias, 1.0, None, 1.0, dtype, accumulator)
    }

    /// The same tensor with its scales 'linear' or 'swizzled'.
    fn with_layout(&self, py: Python<'_>, layout: &str) -> PyResult<Self> {
        let layout = choose("layout", LAYOUTS, layout)?;
        let tensor = self.held.host()?;
        let moved = threads::run(py, || (**tensor).clone().with_layout(layout))?.or_raise()?;
        Ok(QuantTensor::on_host(moved, self.framework))
    }

    /// The same tensor with these directions only: 'row', 'column' or 'both'.
    fn keep(&self, directions: &str) -> PyResult<Self> {
        let directions = choose("directions", DIRECTIONS, directions)?;
        let mut kept = (**self.held.host()?).clone();
        kept.keep(directions).or_raise()?;
        Ok(QuantTensor::on_host(kept, self.framework))
    }

    /// Rows `start` to `end` of the flattened tensor, with the bytes that they have.
    fn slice_rows(&self, start: usize, end: usize) -> PyResult<Self> {
        Ok(QuantTensor::on_host(self.held.host()?.slice_rows(start, end).or_raise()?, self.framework))
    }

    /// The bytes of a safetensors file with this tensor alone, for what is sent and not stored.
    /// `QuantTensor.from_bytes` reads them.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let tensor = self.held.to_host(py)?;
        let tensor = tensor.host()?;
        let bytes = threads::run(py, || nvfp4::to_bytes(tensor))?.or_raise()?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Reads what `to_bytes` wrote, with arrays of numpy. Nothing in it is executed, and nothing
    /// taken on trust.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        Ok(QuantTensor::on_host(threads::run(py, || nvfp4::from_bytes(data))?.or_raise()?, Framework::Numpy))
    }

    /// Pickles keep the bytes, and whether arrays are torch's. A tensor on a GPU arrives in the
    /// host's memory.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let restored = py.import("nvfp4")?.getattr("_restored")?;
        Ok((restored, (self.to_bytes(py)?, self.framework == Framework::Torch)))
    }

    /// A tensor with memory of its own, on the same device.
    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(QuantTensor { held: self.held.copied(py)?, framework: self.framework })
    }

    /// Itself: nothing in it changes.
    fn __copy__(&self) -> Self {
        QuantTensor { held: self.held.clone(), framework: self.framework }
    }

    /// Whether all bytes are the same. Tensors on GPUs are copied for it.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = other.cast::<QuantTensor>() else { return Ok(false) };
        let (a, b) = (self.held.to_host(other.py())?, other.get().held.to_host(other.py())?);
        Ok(a.host()? == b.host()?)
    }

    fn __repr__(&self) -> PyResult<String> {
        let mut text = format!("{:?}", self.held.shape());
        for side in [Side::Row, Side::Column] {
            if let Ok(direction) = self.held.twin(side) {
                text += &format!(" {side}: {}", *direction);
            }
        }
        Ok(format!("QuantTensor({text})"))
    }
}

#[pymethods]
impl Direction {
    /// Rows and columns of the matrix.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        self.size()
    }

    /// The format in recipe syntax.
    #[getter]
    fn format(&self) -> PyResult<String> {
        Ok(self.twin()?.to_string())
    }

    /// 'row' or 'column'.
    #[getter]
    fn side(&self) -> &'static str {
        words::word(SIDES, self.side)
    }

    /// Codes as bytes.
    #[getter]
    fn codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Part::Codes)
    }

    /// Codes of NVFP4 as `torch.float4_e2m1fn_x2`, of FP8 as torch's or ml_dtypes' types.
    #[getter]
    fn typed_codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let name = match &*self.twin()? {
            nvfp4::Direction::Nvfp4(_) if self.framework == Framework::Numpy => {
                return Err(PyTypeError::new_err(
                    "numpy has no type for two codes in a byte: use `codes`, or `as_torch()` for torch.float4_e2m1fn_x2",
                ));
            }
            nvfp4::Direction::Nvfp4(_) => "float4_e2m1fn_x2",
            nvfp4::Direction::Fp8(d) => match d.code() {
                nvfp4::Fp8Code::E4m3 => "float8_e4m3fn",
                nvfp4::Fp8Code::E5m2 => "float8_e5m2",
            },
            nvfp4::Direction::Plain(_) => return self.array(py, Part::Codes),
        };
        self.view(py, self.array(py, Part::Codes)?, name)
    }

    /// Scales as numbers: E4M3 bytes for NVFP4, E8M0 bytes for MXFP8, float32 for FP8.
    #[getter]
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Part::Scales)
    }

    /// Scales with torch's or ml_dtypes' type: float8_e4m3fn, float8_e8m0fnu or float32.
    #[getter]
    fn typed_scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let scales = self.array(py, Part::Scales)?;
        match &*self.twin()? {
            nvfp4::Direction::Nvfp4(_) => self.view(py, scales, "float8_e4m3fn"),
            nvfp4::Direction::Fp8(d) => match d.scales() {
                nvfp4_spec::fp8::ScaleRef::E8m0(_) => self.view(py, scales, "float8_e8m0fnu"),
                nvfp4_spec::fp8::ScaleRef::F32(_) => Ok(scales),
            },
            nvfp4::Direction::Plain(_) => Ok(scales),
        }
    }

    /// Scale bytes of NVFP4 in whole tiles of 128 × 4, as block-scaled tensor cores read them.
    #[getter]
    fn swizzled_scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let layout = self.twin()?.nvfp4().or_raise()?.layout();
        match layout {
            Layout::Swizzled => self.array(py, Part::Scales),
            Layout::Linear => {
                let nvfp4 = self.held.host()?.nvfp4(self.side).or_raise()?;
                let swizzled = threads::run(py, || nvfp4.clone().with_layout(Layout::Swizzled))?.or_raise()?;
                let shape = part::scale_shape(Layout::Swizzled, nvfp4.rows(), nvfp4.cols());
                self.framework.bytes(py, swizzled.scales().to_vec(), &shape)
            }
        }
    }

    /// The stored 32-bit scale of NVFP4, one number or one per row; `unit` says what it is.
    #[getter]
    fn global_scale<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Part::Global)
    }

    /// What the stored 32-bit scale is: 'amax', or a 'multiplier' or 'divisor' of decoded values.
    #[getter]
    fn unit(&self) -> PyResult<&'static str> {
        Ok(match self.twin()?.nvfp4().or_raise()?.unit() {
            Unit::Amax(_) => "amax",
            Unit::Multiplier => "multiplier",
            Unit::Divisor => "divisor",
        })
    }

    /// The largest magnitude, one number or one per row, where it is what is stored.
    #[getter]
    fn amax<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let amax = self.array(py, Part::Global)?;
        match self.unit()? {
            "amax" => Ok(amax),
            unit => Err(PyAttributeError::new_err(format!("this profile stores a {unit}: read `global_scale`"))),
        }
    }

    /// The numbers of a direction that is not quantized, as they lie in memory: those of the
    /// tensor, not transposed.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Part::Values)
    }

    /// The signs of the Hadamard transform as a number, or None.
    #[getter]
    fn rotation(&self) -> PyResult<Option<u16>> {
        Ok(self.twin()?.rotation().map(|signs| signs.0))
    }

    /// 'linear' or 'swizzled'.
    #[getter]
    fn layout(&self) -> PyResult<&'static str> {
        Ok(words::word(LAYOUTS, self.twin()?.nvfp4().or_raise()?.layout()))
    }

    /// All arrays, for `QuantTensor.from_parts`.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self._parts(py)?.into_iter().map(|array| self.framework.unchangeable(array)).collect()
    }

    /// All arrays over the tensor's own memory, for code that gives the tensor up and keeps its
    /// arrays: torch's can be written to, which nothing may do while a tensor is in use.
    fn _parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        parts::take_apart(py, &self.held, self.side, self.framework)
    }

    /// The decoded matrix; for a column direction still transposed, and rotated if the Hadamard
    /// transform was on.
    #[pyo3(signature = (dtype=None))]
    fn dequantize<'py>(&self, py: Python<'py>, dtype: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        self.decoded(py, dtype, &[self.size().0, self.size().1])
    }

    fn __repr__(&self) -> PyResult<String> {
        let (rows, cols) = self.size();
        Ok(format!("Direction({} [{rows}, {cols}] {})", self.side, *self.twin()?))
    }
}

impl Direction {
    fn decoded<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        let precision = dtype.map_or(Ok(Precision::F32), |dtype| words::precision(&dtype))?;
        self.held.dequantize(py, self.side, precision, shape, self.framework)
    }

    /// An array with a type that numpy and torch name alike.
    fn view<'py>(&self, py: Python<'py>, array: Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let library = match self.framework {
            Framework::Numpy => "ml_dtypes",
            Framework::Torch => "torch",
        };
        let missing =
            |_| PyTypeError::new_err(format!("this needs {library} with {name}: install it, or read the bytes"));
        let dtype = py.import(library).and_then(|library| library.getattr(name)).map_err(missing)?;
        array.call_method1("view", (dtype,))
    }
}
