//! Arrays of numpy and torch, in and out.

#[cfg(feature = "cuda")]
mod cuda;

#[cfg(feature = "cuda")]
pub use cuda::check_torch;

use crate::dlpack::{DataType, Lent, Tensor};
use crate::error::OrRaise;
use crate::place::Place;
use crate::words;
use half::{bf16, f16};
use nvfp4::{Elements, Precision, TensorRef, Values};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Whose arrays a caller works with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// numpy's.
    Numpy,
    /// torch's.
    Torch,
}

impl Framework {
    /// Whose array this is. What is neither's comes back as numpy's.
    pub fn of(x: &Bound<'_, PyAny>) -> PyResult<Framework> {
        let py = x.py();
        let module = x.get_type().module()?.to_string();
        if module == "torch" || module.starts_with("torch.") {
            return Ok(Framework::Torch);
        }
        // A class that someone derived from torch's: only where torch was imported can there be
        // one.
        let modules = py.import("sys")?.getattr("modules")?;
        match modules.get_item("torch").and_then(|torch| torch.getattr("Tensor")) {
            Ok(class) if x.is_instance(class.cast::<PyType>()?)? => Ok(Framework::Torch),
            _ => Ok(Framework::Numpy),
        }
    }

    /// An array over memory of ours, without a copy.
    pub fn array<'py>(self, py: Python<'py>, lent: Lent) -> PyResult<Bound<'py, PyAny>> {
        let library = match self {
            Framework::Numpy => py.import("numpy")?,
            Framework::Torch => py.import("torch")?,
        };
        let bf16 = lent.dtype() == DataType::BF16;
        // numpy has no bfloat16 of its own, and takes none from DLPack.
        let lent = if bf16 && self == Framework::Numpy { lent.cast(DataType::U16) } else { lent };
        let array = library.call_method1("from_dlpack", (Bound::new(py, lent)?,))?;
        match (self, bf16) {
            (Framework::Numpy, true) => {
                let missing =
                    |_| PyTypeError::new_err("bfloat16 in numpy needs `pip install ml_dtypes`, or another dtype");
                let dtype = py.import("ml_dtypes").map_err(missing)?.getattr("bfloat16")?;
                array.call_method1("view", (dtype,))
            }
            _ => Ok(array),
        }
    }

    /// A view of memory that must not change, as callers may have it: numpy's cannot be written to;
    /// torch has no such tensors, so that a copy takes its place.
    pub fn unchangeable<'py>(self, view: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Framework::Numpy => Ok(view),
            Framework::Torch => view.call_method0("clone"),
        }
    }

    /// An array of bytes that nobody else has.
    pub fn bytes<'py>(self, py: Python<'py>, bytes: Vec<u8>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        self.changeable(self.array(py, Lent::owned(bytes, DataType::U8, shape))?)
    }

    /// An array that is the caller's to change. Before 2.1, numpy takes none from DLPack: then it
    /// is copied.
    fn changeable<'py>(self, array: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Framework::Numpy if !array.getattr("flags")?.getattr("writeable")?.is_truthy()? => copied(&array, self),
            _ => Ok(array),
        }
    }

    /// An array of numbers that nobody else has.
    pub fn owned<'py>(self, py: Python<'py>, elements: Elements, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let lent = match elements {
            Elements::F32(x) => Lent::owned(x, DataType::F32, shape),
            Elements::Bf16(x) => Lent::owned(x, DataType::BF16, shape),
            Elements::F16(x) => Lent::owned(x, DataType::F16, shape),
        };
        self.changeable(self.array(py, lent)?)
    }
}

/// Numbers borrowed from another library.
pub struct Array {
    tensor: Tensor,
    precision: Precision,
    /// Where they lie.
    pub place: Place,
    /// Whose it is.
    pub framework: Framework,
}

impl Array {
    /// Borrows an array: `float32`, `bfloat16` or `float16`, of any shape and strides. What has
    /// negative strides, or strides between elements as the fields of records have, is copied.
    pub fn of(x: &Bound<'_, PyAny>) -> PyResult<Array> {
        let framework = Framework::of(x)?;
        let (tensor, dtype) = borrow(x, framework)?;
        Array::over(x, tensor, dtype, framework)
    }

    /// Borrows a tensor of torch for as long as the object lives.
    pub fn of_torch(x: &Bound<'_, PyAny>) -> PyResult<Array> {
        let tensor = Tensor::borrowed(x)?;
        let dtype = tensor.dtype;
        Array::over(x, tensor, dtype, Framework::Torch)
    }

    fn over(x: &Bound<'_, PyAny>, tensor: Tensor, dtype: DataType, framework: Framework) -> PyResult<Array> {
        let place = Place::of(&tensor)?;
        let precision = match dtype {
            DataType::F32 => Precision::F32,
            DataType::BF16 => Precision::Bf16,
            DataType::F16 => Precision::F16,
            other => return Err(wrong_dtype(&self::dtype(x).map_or(format!("{other:?}"), |name| name.to_string()))),
        };
        let array = Array { tensor, precision, place, framework };
        match (place, array.values()) {
            #[cfg(feature = "cuda")]
            (Place::Cuda(_), _) => array.with_rows(x),
            (Place::Host, Some(_)) => Ok(array),
            (Place::Host, None) => Ok(Array { tensor: borrow(&copied(x, framework)?, framework)?.0, ..array }),
        }
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    /// The type of its elements.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Whether there are no gaps between its elements.
    pub fn is_dense(&self) -> bool {
        self.tensor.reach() == Some(self.shape().iter().product())
    }

    fn values(&self) -> Option<Values<'_>> {
        Some(match self.precision {
            Precision::F32 => Values::F32(self.tensor.slice::<f32>()?),
            Precision::Bf16 => Values::Bf16(self.tensor.slice::<bf16>()?),
            Precision::F16 => Values::F16(self.tensor.slice::<f16>()?),
        })
    }

    /// A copy of an array that lies row by row.
    pub fn to_elements(&self) -> PyResult<Elements> {
        Ok(match self.tensor_ref()?.values() {
            Values::F32(x) => Elements::F32(x.to_vec()),
            Values::Bf16(x) => Elements::Bf16(x.to_vec()),
            Values::F16(x) => Elements::F16(x.to_vec()),
        })
    }

    /// As the library takes it.
    pub fn tensor_ref(&self) -> PyResult<TensorRef<'_>> {
        self.place.host("an array")?;
        let unreadable = || PyValueError::new_err("the memory of the array is not aligned; copy it");
        let strides: Option<Vec<usize>> =
            self.tensor.strides.iter().map(|&stride| usize::try_from(stride).ok()).collect();
        let (values, strides) = (self.values().ok_or_else(unreadable)?, strides.ok_or_else(unreadable)?);
        TensorRef::strided(values, &self.tensor.shape, &strides).or_raise()
    }
}

/// A tensor that lies in pieces on several devices has no memory of its own to lend.
fn check_pieces(x: &Bound<'_, PyAny>, framework: Framework) -> PyResult<()> {
    if framework == Framework::Torch && x.get_type().name()? == "DTensor" {
        let advice = "a DTensor lies in pieces on several devices; pass x.to_local(), or x.full_tensor()";
        return Err(PyTypeError::new_err(advice));
    }
    Ok(())
}

/// Takes an array's memory over, with the type of its elements.
fn borrow(x: &Bound<'_, PyAny>, framework: Framework) -> PyResult<(Tensor, DataType)> {
    check_mask(x)?;
    check_pieces(x, framework)?;
    let lent = match framework {
        Framework::Torch if x.getattr("requires_grad").is_ok_and(|grad| grad.is_truthy().unwrap_or(false)) => {
            Tensor::of(&x.call_method0("detach")?)
        }
        Framework::Numpy if is_bf16(x) => {
            return Ok((take(&x.call_method1("view", ("uint16",))?, framework)?, DataType::BF16));
        }
        _ => take(x, framework),
    };
    let tensor = lent.map_err(|error| match dtype(x) {
        // A library does not lend what DLPack has no name for.
        Ok(dtype) if error.is_instance_of::<PyBufferError>(x.py()) && words::precision(&dtype).is_err() => {
            wrong_dtype(&dtype.to_string())
        }
        _ => error,
    })?;
    let dtype = tensor.dtype;
    Ok((tensor, dtype))
}

/// Takes an array's memory over. What numpy does not lend, strides that are no multiple of an
/// element and, before numpy 2.1, memory that is read-only, is copied.
fn take(x: &Bound<'_, PyAny>, framework: Framework) -> PyResult<Tensor> {
    Tensor::of(x).or_else(|error| match framework {
        Framework::Numpy if error.is_instance_of::<PyBufferError>(x.py()) => {
            copied(x, framework).map_or(Err(error), |copy| Tensor::of(&copy))
        }
        _ => Err(error),
    })
}

/// The same numbers, row by row, in memory of their own.
fn copied<'py>(x: &Bound<'py, PyAny>, framework: Framework) -> PyResult<Bound<'py, PyAny>> {
    match framework {
        Framework::Numpy => x.call_method1("copy", ("C",)),
        Framework::Torch => x.call_method0("clone")?.call_method0("contiguous"),
    }
}

/// An error for a masked array of numpy: what is masked would be quantized with the rest.
fn check_mask(x: &Bound<'_, PyAny>) -> PyResult<()> {
    let modules = x.py().import("sys")?.getattr("modules")?;
    // Only where this module was imported can there be one.
    match modules.get_item("numpy.ma").and_then(|masked| masked.getattr("MaskedArray")) {
        Ok(class) if x.is_instance(class.cast::<PyType>()?)? => Err(PyTypeError::new_err(
            "a masked array: its mask would be ignored; fill it first, for instance with x.filled(0.0)",
        )),
        _ => Ok(()),
    }
}

/// An array's own name for the type of its elements, which says their order of bytes too.
fn dtype<'py>(x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    Ok(x.getattr("dtype")?.str()?.into_any())
}

/// Whether this is a numpy array of `ml_dtypes.bfloat16`, which numpy does not lend out.
fn is_bf16(x: &Bound<'_, PyAny>) -> bool {
    let name = x.getattr("dtype").and_then(|dtype| dtype.getattr("name"));
    name.is_ok_and(|name| name.extract::<String>().is_ok_and(|name| name == "bfloat16"))
}

fn wrong_dtype(name: &str) -> PyErr {
    PyTypeError::new_err(format!("expected float32, bfloat16 or float16 elements, got {name}; cast the array first"))
}

/// Bytes of an array of `uint8`, or of another type with elements of one byte.
pub fn bytes(x: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    check_mask(x)?;
    // float8 and float4 are not in every version of DLPack: their bytes are.
    let framework = Framework::of(x)?;
    let x = match framework {
        Framework::Torch => x.call_method1("view", (x.py().import("torch")?.getattr("uint8")?,))?,
        Framework::Numpy => x.call_method1("view", ("uint8",))?,
    };
    let tensor = take(&contiguous(&x)?, framework)?;
    Place::of(&tensor)?.host("an array")?;
    let bytes = tensor.slice::<u8>().ok_or_else(|| PyTypeError::new_err("expected an array of bytes"))?;
    Ok(bytes.to_vec())
}

/// Numbers of float32: an array, or numbers of Python, which are rounded to float32.
///
/// An array of another type says that its numbers are of another precision: they are taken where
/// float32 has them exactly, and are an error where they would be rounded unseen.
pub fn floats(x: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    if !x.hasattr("dtype")? {
        let number = x.extract::<f32>().map(|number| vec![number]);
        return number.or_else(|_| x.extract::<Vec<f32>>()).map_err(|_| not_numbers());
    }
    check_mask(x)?;
    let array = contiguous(x)?;
    // Numbers of other types than those that are lent can be exact as well.
    let Ok((tensor, dtype)) = borrow(&array, Framework::of(x)?) else { return exact(&array) };
    Place::of(&tensor)?.host("an array")?;
    match (dtype, tensor.slice::<f32>()) {
        (DataType::F32, Some(values)) => Ok(values.to_vec()),
        _ => exact(&array),
    }
}

fn not_numbers() -> PyErr {
    PyTypeError::new_err("expected a number or an array of float32")
}

/// The numbers of an array of another type, all of which float32 has.
fn exact(x: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    let wide: Vec<f64> = x
        .call_method1("reshape", (-1,))
        .and_then(|flat| flat.call_method0("tolist")?.extract())
        .map_err(|_| not_numbers())?;
    let narrow = |number: f64| match number as f32 {
        same if f64::from(same) == number || number.is_nan() => Ok(same),
        near => {
            let (dtype, near) = (x.getattr("dtype")?, f64::from(near));
            Err(PyTypeError::new_err(format!(
                "expected float32, got {dtype} with {number:?}, which float32 does not have (the nearest is {near:?}); \
                 cast the array first"
            )))
        }
    };
    wide.into_iter().map(narrow).collect()
}

/// The array itself where it lies row by row, else a copy that does.
pub fn contiguous<'py>(x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    match Framework::of(x)? {
        Framework::Torch => x.call_method0("contiguous"),
        Framework::Numpy => x.py().import("numpy")?.call_method1("ascontiguousarray", (x,)),
    }
}
