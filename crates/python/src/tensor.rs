//! Quantized tensors and their directions.

use crate::array::Framework;
use crate::error::OrRaise;
use crate::matmul::matmul;
use crate::parts::{self, Part};
use crate::threads;
use crate::words::{self, DIRECTIONS, LAYOUTS, SIDES, choose};
use half::{bf16, f16};
use nvfp4::{Elements, Layout, Precision, Side, Unit};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// A quantized tensor: a shape and one or two directions, each with its codes and scales.
///
/// Arrays come back as views, in the library that the input came from (`as_numpy()` and `as_torch()` choose another). They are read-only.
#[pyclass(frozen, module = "nvfp4")]
pub struct QuantTensor {
    /// The bytes.
    pub inner: Arc<nvfp4::QuantTensor>,
    framework: Framework,
}

/// One direction of a quantized tensor: the matrix, or for the column direction the transposed one, quantized along its rows.
#[pyclass(frozen, module = "nvfp4")]
pub struct Direction {
    tensor: Arc<nvfp4::QuantTensor>,
    side: Side,
    /// In whose arrays results come.
    pub framework: Framework,
}

impl QuantTensor {
    /// A tensor whose arrays are shown in a library.
    pub fn new(inner: nvfp4::QuantTensor, framework: Framework) -> Self {
        QuantTensor { inner: Arc::new(inner), framework }
    }

    /// A direction that is there.
    pub fn side(&self, side: Side) -> PyResult<Direction> {
        self.inner.direction(side).or_raise()?;
        Ok(Direction { tensor: Arc::clone(&self.inner), side, framework: self.framework })
    }
}

impl Direction {
    /// As the library has it.
    pub fn inner(&self) -> &nvfp4::Direction {
        self.tensor.direction(self.side).expect("made for a direction that is there")
    }

    fn array<'py>(&self, py: Python<'py>, part: Part) -> PyResult<Bound<'py, PyAny>> {
        self.framework.array(py, parts::lend(&self.tensor, self.side, part)?)
    }
}

#[pymethods]
impl QuantTensor {
    /// from_parts(spec, shape, *, row=None, column=None, framework=None)
    /// --
    ///
    /// A tensor over existing arrays, as `Direction.parts` gives them; their bytes are copied. `spec` is the text of its formats.
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
        PyTuple::new(py, self.inner.shape())
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

    /// The row direction's codes as bytes: in NVFP4 [rows, ceil(cols / 2)], the even element in the low nibble.
    #[getter]
    fn codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.side(Side::Row)?.codes(py)
    }

    /// The row direction's block scales: in NVFP4 E4M3 bytes, [rows, ceil(cols / 16)], or whole tiles of 128 × 4 if swizzled.
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
        self.inner.byte_len()
    }

    /// The same tensor with arrays of numpy.
    fn as_numpy(&self) -> Self {
        QuantTensor { inner: Arc::clone(&self.inner), framework: Framework::Numpy }
    }

    /// The same tensor with arrays of torch.
    fn as_torch(&self) -> Self {
        QuantTensor { inner: Arc::clone(&self.inner), framework: Framework::Torch }
    }

    /// dequantize(dtype="float32", *, side="row")
    /// --
    ///
    /// The decoded values. The column direction comes transposed, and rotated if the Hadamard transform was on.
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
            Side::Row => self.inner.shape().to_vec(),
            Side::Column => vec![direction.inner().rows(), direction.inner().cols()],
        };
        direction.decoded(py, dtype, &shape)
    }

    /// matmul(other, *, bias=None, dtype="float32")
    /// --
    ///
    /// The product of the row directions: self · otherᵀ. `nvfp4.matmul` has more settings.
    #[pyo3(signature = (other, *, bias=None, dtype=None))]
    fn matmul<'py>(
        slf: &Bound<'py, Self>,
        other: &Bound<'py, PyAny>,
        bias: Option<Bound<'py, PyAny>>,
        dtype: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        matmul(slf.py(), slf.as_any(), other, bias, 1.0, None, 1.0, dtype)
    }

    /// The same tensor with its scales 'linear' or 'swizzled'.
    fn with_layout(&self, py: Python<'_>, layout: &str) -> PyResult<Self> {
        let layout = choose("layout", LAYOUTS, layout)?;
        let moved = threads::run(py, || (*self.inner).clone().with_layout(layout))?.or_raise()?;
        Ok(QuantTensor::new(moved, self.framework))
    }

    /// The same tensor with these directions only: 'row', 'column' or 'both'.
    fn keep(&self, directions: &str) -> PyResult<Self> {
        let directions = choose("directions", DIRECTIONS, directions)?;
        let mut kept = (*self.inner).clone();
        kept.keep(directions).or_raise()?;
        Ok(QuantTensor::new(kept, self.framework))
    }

    /// Rows `start` to `end` of the flattened tensor, with the bytes that they have.
    fn slice_rows(&self, start: usize, end: usize) -> PyResult<Self> {
        Ok(QuantTensor::new(self.inner.slice_rows(start, end).or_raise()?, self.framework))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<QuantTensor>().is_ok_and(|other| *other.get().inner == *self.inner)
    }

    fn __repr__(&self) -> String {
        format!("QuantTensor({})", self.inner)
    }
}

#[pymethods]
impl Direction {
    /// Rows and columns of the matrix.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.inner().rows(), self.inner().cols())
    }

    /// The format in the words of a spec.
    #[getter]
    fn format(&self) -> String {
        self.inner().to_string()
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
        let name = match self.inner() {
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
        match self.inner() {
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
        let nvfp4 = self.inner().nvfp4().or_raise()?;
        match nvfp4.layout() {
            Layout::Swizzled => self.array(py, Part::Scales),
            Layout::Linear => {
                let swizzled = threads::run(py, || nvfp4.clone().with_layout(Layout::Swizzled))?.or_raise()?;
                let shape = parts::scale_shape(Layout::Swizzled, nvfp4.rows(), nvfp4.cols());
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
        Ok(match self.inner().nvfp4().or_raise()?.unit() {
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

    /// The numbers of a direction that is not quantized, as they lie in memory: those of the tensor, not transposed.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Part::Values)
    }

    /// The signs of the Hadamard transform as a number, or None.
    #[getter]
    fn rotation(&self) -> Option<u16> {
        self.inner().rotation().map(|signs| signs.0)
    }

    /// 'linear' or 'swizzled'.
    #[getter]
    fn layout(&self) -> PyResult<&'static str> {
        Ok(words::word(LAYOUTS, self.inner().nvfp4().or_raise()?.layout()))
    }

    /// All arrays, for `QuantTensor.from_parts`.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        parts::take_apart(py, &self.tensor, self.side, self.framework)
    }

    /// dequantize(dtype="float32")
    /// --
    ///
    /// The decoded matrix; for a column direction still transposed, and rotated if the Hadamard transform was on.
    #[pyo3(signature = (dtype=None))]
    fn dequantize<'py>(&self, py: Python<'py>, dtype: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        self.decoded(py, dtype, &[self.inner().rows(), self.inner().cols()])
    }

    fn __repr__(&self) -> String {
        let (rows, cols) = self.shape();
        format!("Direction({} [{rows}, {cols}] {})", self.side, self.inner())
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
        let direction = self.inner();
        let values = threads::run(py, || match precision {
            Precision::F32 => direction.dequantize::<f32>().map(Elements::F32),
            Precision::Bf16 => direction.dequantize::<bf16>().map(Elements::Bf16),
            Precision::F16 => direction.dequantize::<f16>().map(Elements::F16),
        })?;
        self.framework.owned(py, values.or_raise()?, shape)
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
