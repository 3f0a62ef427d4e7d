//! A GGUF file: its description, checked before anything is believed, and its bytes by position.

use super::container::{ALIGNMENT, MAGIC, Type, Value, tag};
use crate::file::read_part;
use crate::weight::sized;
use crate::{Error, Result};
use half::{bf16, f16};
use nvfp4::{GlobalScale, Unit};
use nvfp4_files::positioned::Bytes;
use nvfp4_files::regular;
use nvfp4_kernels::{Implementation, dequantize, gguf};
use nvfp4_spec::BLOCK;
use nvfp4_spec::gguf::{BLOCK_BYTES, BLOCK_ELEMENTS};
use nvfp4_spec::matrix::View;
use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The longest description that is read: a vocabulary of a million tokens takes about 50 MB.
const MAX_HEADER: u64 = 128 << 20;

/// The most keys, and the most tensors, that are read.
const MAX_COUNT: u64 = 1 << 20;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// What its elements are stored as.
    pub kind: Type,
    /// Its dimensions, from the fastest (the columns) to the slowest.
    pub dims: Vec<u64>,
    /// Where its bytes start in the file.
    pub start: u64,
    /// How many bytes it has; for an unknown type, how many there are until the next tensor.
    pub len: u64,
}

impl GgufTensor {
    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.dims.first().map_or(1, |&d| d as usize)
    }

    /// Rows, those of all experts one after the other.
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).product::<u64>() as usize
    }

    /// Number of matrices: experts have several.
    pub fn matrices(&self) -> usize {
        self.dims.iter().skip(2).product::<u64>() as usize
    }
}

/// An open GGUF file whose description has been checked.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    bytes: Bytes,
    values: BTreeMap<String, Value>,
    tensors: Vec<GgufTensor>,
    /// Where each tensor is in the list.
    index: BTreeMap<String, usize>,
    len: u64,
}

/// Whether a file says that it is GGUF.
pub fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    regular::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok()) && magic == MAGIC
}

impl GgufFile {
    /// Opens a file and checks its description: lengths, types, and that tensors lie in the file
    /// without overlap.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::io(path, source);
        let file = regular::open(path)?;
        let len = file.metadata().map_err(io)?.len();
        let parsed = parse(BufReader::new(&file), len);
        Self::new(path, parsed, Bytes::File(file), len)
    }

    /// A file that is in memory; errors call it `path`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let len = bytes.len() as u64;
        let parsed = parse(&bytes[..], len);
        Self::new(path, parsed, Bytes::Memory(bytes), len)
    }

    fn new(path: &Path, parsed: Checked<Parsed>, bytes: Bytes, len: u64) -> Result<Self> {
        let (values, tensors) = parsed.map_err(|reason| Error::content(path, format!("GGUF: {reason}")))?;
        let index = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(GgufFile { path: path.to_path_buf(), bytes, values, tensors, index, len })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes.
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Its keys and values.
    pub fn values(&self) -> &BTreeMap<String, Value> {
        &self.values
    }

    /// Its tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<&GgufTensor> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The architecture that it names.
    pub fn architecture(&self) -> Option<&str> {
        self.values.get("general.architecture")?.text()
    }

    /// NVFP4 tensors.
    pub fn nvfp4(&self) -> impl Iterator<Item = &GgufTensor> {
        self.tensors.iter().filter(|t| t.kind == Type::NVFP4)
    }

    /// The tensor scales of an NVFP4 tensor, one for each matrix: what llama.cpp multiplies
    /// products by, 1 if absent.
    pub fn scales(&self, tensor: &GgufTensor) -> Result<Vec<f32>> {
        Ok(self.scalars(tensor, "scale")?.unwrap_or_else(|| vec![1.0; tensor.matrices()]))
    }

    /// The activation scales for an NVFP4 tensor, one for each matrix, where a file has them.
    pub fn input_scales(&self, tensor: &GgufTensor) -> Result<Option<Vec<f32>>> {
        self.scalars(tensor, "input_scale")
    }

    /// A number for each matrix of a tensor, from the tensor beside it with this end of its name.
    fn scalars(&self, tensor: &GgufTensor, end: &str) -> Result<Option<Vec<f32>>> {
        let name = tensor.name.strip_suffix(".weight").map(|module| format!("{module}.{end}"));
        let Some(scale) = name.and_then(|name| self.get(&name)) else { return Ok(None) };
        if scale.kind != Type::F32 || scale.dims.iter().product::<u64>() != tensor.matrices() as u64 {
            let (expected, kind) = (tensor.matrices(), scale.kind);
            let wrong = format!("expected {expected} F32 scales, got {kind} of {:?}", scale.dims);
            return Err(self.wrong(&scale.name, &wrong));
        }
        self.floats(scale, 0..scale.rows()).map(Some)
    }

    /// Codes (even element in the low nibble) and block scales of some rows of an NVFP4 tensor.
    pub fn codes_and_scales(
        &self,
        tensor: &GgufTensor,
        rows: Range<usize>,
        codes: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) -> Result<()> {
        if tensor.kind != Type::NVFP4 {
            return Err(self.wrong(&tensor.name, &format!("expected NVFP4, got {}", tensor.kind)));
        }
        self.check_rows(tensor, &rows)?;
        let (cols, count) = (tensor.cols(), rows.len());
        let mut packed = vec![0; count * (cols / BLOCK_ELEMENTS) * BLOCK_BYTES];
        self.read(tensor, (rows.start * (cols / BLOCK_ELEMENTS) * BLOCK_BYTES) as u64, &mut packed)?;
        let (codes, scales) = (sized(codes, count * cols / 2), sized(scales, count * cols / BLOCK));
        Ok(gguf::unpack(Implementation::best(), &packed, count, cols, codes, scales)?)
    }

    /// The values of some rows of a tensor of floats, or of an NVFP4 tensor with its tensor scales.
    pub fn floats(&self, tensor: &GgufTensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.check_rows(tensor, &rows)?;
        let cols = tensor.cols();
        let bytes = |size: usize| {
            let mut bytes = vec![0; rows.len() * cols * size];
            self.read(tensor, (rows.start * cols * size) as u64, &mut bytes).map(|()| bytes)
        };
        Ok(match tensor.kind {
            Type::F32 => bytes(4)?.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            Type::F16 => bytes(2)?.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
            Type::BF16 => bytes(2)?.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            Type::NVFP4 => self.decode(tensor, rows)?,
            other => return Err(self.wrong(&tensor.name, &format!("{other} is not decoded here"))),
        })
    }

    /// As a checkpoint's weight is decoded: by codes, block scales and a tensor scale, in the
    /// rule's order.
    fn decode(&self, tensor: &GgufTensor, rows: Range<usize>) -> Result<Vec<f32>> {
        let (globals, each) = (self.scales(tensor)?, tensor.rows() / tensor.matrices().max(1));
        let (mut values, mut codes, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = rows.start;
        while start < rows.end {
            let end = rows.end.min((start / each + 1) * each);
            self.codes_and_scales(tensor, start..end, &mut codes, &mut scales)?;
            let view = View {
                rows: end - start,
                cols: tensor.cols(),
                codes: &codes,
                scales: &scales,
                stored: &globals[start / each..][..1],
                global: GlobalScale::PerTensor,
                unit: Unit::Multiplier,
            };
            let from = values.len();
            values.resize(from + view.rows * view.cols, 0f32);
            dequantize::dequantize(Implementation::best(), &view, &mut values[from..])?;
            start = end;
        }
        Ok(values)
    }

    fn check_rows(&self, tensor: &GgufTensor, rows: &Range<usize>) -> Result<()> {
        match rows.start <= rows.end && rows.end <= tensor.rows() {
            true => Ok(()),
            false => Err(Error::out_of_range(rows, tensor.rows())),
        }
    }

    fn read(&self, tensor: &GgufTensor, offset: u64, bytes: &mut [u8]) -> Result<()> {
        read_part(&self.bytes, &self.path, (&tensor.name, tensor.start, tensor.len), offset, bytes)
    }

    fn wrong(&self, tensor: &str, reason: &str) -> Error {
        Error::content(&self.path, format!("tensor '{tensor}': {reason}"))
    }
}

/// Checks a whole file that is in memory, for fuzzing: whatever the bytes, this returns.
#[doc(hidden)]
pub fn check_gguf(bytes: &[u8]) -> bool {
    parse(bytes, bytes.len() as u64).is_ok()
}

type Parsed = (BTreeMap<String, Value>, Vec<GgufTensor>);
type Checked<T> = std::result::Result<T, String>;

/// What is left to read, and how much of the description was read.
struct Source<R> {
    from: R,
    at: u64,
    len: u64,
}

impl<R: Read> Source<R> {
    fn bytes<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let mut bytes = [0; N];
        self.need(N as u64)?;
        self.from.read_exact(&mut bytes).map_err(|e| e.to_string())?;
        self.at += N as u64;
        Ok(bytes)
    }

    /// Refuses what the file is too short for, before anything is allocated for it.
    fn need(&self, len: u64) -> Checked<()> {
        if self.len - self.at < len {
            return Err(format!("the description needs {len} bytes at byte {}; the file is truncated", self.at));
        }
        if self.at.saturating_add(len) > MAX_HEADER {
            return Err(format!("a description of more than {MAX_HEADER} bytes"));
        }
        Ok(())
    }

    fn u32(&mut self) -> Checked<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Checked<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Checked<String> {
        let len = self.u64()?;
        self.need(len)?;
        let mut bytes = vec![0; len as usize];
        self.from.read_exact(&mut bytes).map_err(|e| e.to_string())?;
        self.at += len;
        String::from_utf8(bytes).map_err(|_| format!("text before byte {} is not UTF-8", self.at))
    }

    fn skip(&mut self, len: u64) -> Checked<()> {
        self.need(len)?;
        std::io::copy(&mut (&mut self.from).take(len), &mut std::io::sink()).map_err(|e| e.to_string())?;
        self.at += len;
        Ok(())
    }

    fn value(&mut self) -> Checked<Value> {
        Ok(match self.u32()? {
            tag::U8 => Value::U32(u8::from_le_bytes(self.bytes()?).into()),
            tag::I8 => Value::I32(i8::from_le_bytes(self.bytes()?).into()),
            tag::U16 => Value::U32(u16::from_le_bytes(self.bytes()?).into()),
            tag::I16 => Value::I32(i16::from_le_bytes(self.bytes()?).into()),
            tag::U32 => Value::U32(self.u32()?),
            tag::I32 => Value::I32(i32::from_le_bytes(self.bytes()?)),
            tag::F32 => Value::F32(f32::from_le_bytes(self.bytes()?)),
            tag::BOOL => Value::Bool(self.bytes::<1>()? != [0]),
            tag::TEXT => Value::Text(self.text()?),
            tag::U64 => Value::Long(self.u64()?.into()),
            tag::I64 => Value::Long(i64::from_le_bytes(self.bytes()?).into()),
            tag::F64 => Value::F64(f64::from_le_bytes(self.bytes()?)),
            tag::ARRAY => self.array()?,
            other => return Err(format!("a value of the unknown type {other}")),
        })
    }

    fn array(&mut self) -> Checked<Value> {
        let (of, len) = (self.u32()?, self.u64()?);
        let size = match of {
            tag::U8 | tag::I8 | tag::BOOL => 1,
            tag::U16 | tag::I16 => 2,
            tag::U32 | tag::I32 | tag::F32 => 4,
            tag::U64 | tag::I64 | tag::F64 | tag::TEXT => 8,
            other => return Err(format!("an array of the type {other}, which is not read")),
        };
        self.need(len.checked_mul(size).ok_or("an array longer than 64 bits can count")?)?;
        Ok(match of {
            tag::TEXT => Value::Texts((0..len).map(|_| self.text()).collect::<Checked<_>>()?),
            tag::I32 => Value::I32s((0..len).map(|_| self.bytes().map(i32::from_le_bytes)).collect::<Checked<_>>()?),
            tag::F32 => Value::F32s((0..len).map(|_| self.bytes().map(f32::from_le_bytes)).collect::<Checked<_>>()?),
            _ => {
                self.skip(len * size)?;
                Value::Skipped(len)
            }
        })
    }

    fn tensor(&mut self) -> Checked<GgufTensor> {
        let (name, rank) = (self.text()?, self.u32()?);
        let wrong = |reason: &str| format!("tensor '{name}': {reason}");
        if rank > 4 {
            return Err(wrong(&format!("{rank} dimensions, more than 4")));
        }
        let dims = (0..rank).map(|_| self.u64()).collect::<Checked<Vec<u64>>>()?;
        let (kind, start) = (Type(self.u32()?), self.u64()?);
        // A zero among them must not hide how large the product of the others is.
        let countable = dims.iter().filter(|d| **d > 0).try_fold(1u64, |n, &d| n.checked_mul(d));
        if countable.is_none_or(|n| usize::try_from(n).is_err()) {
            return Err(wrong(&format!("the dimensions {dims:?} have more elements than an address can count")));
        }
        // What is quantized has elements, so that the file's bytes bound its rows, columns and
        // matrices.
        if kind == Type::NVFP4 && dims.contains(&0) {
            return Err(wrong(&format!("a quantized weight of the dimensions {dims:?} has no elements; remove it")));
        }
        let len = match kind.byte_len(&dims) {
            Some(len) => len,
            None if kind.is_known() => {
                return Err(wrong(&format!("{kind} cannot have the dimensions {dims:?}")));
            }
            None => 0,
        };
        Ok(GgufTensor { name, kind, dims, start, len })
    }
}

/// Reads and checks the description of a file of `len` bytes.
fn parse(from: impl Read, len: u64) -> Checked<Parsed> {
    let mut source = Source { from, at: 0, len };
    if source.bytes::<4>()? != MAGIC {
        return Err("it does not begin with 'GGUF'".to_string());
    }
    match source.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => return Err("big-endian, which is not read".to_string()),
        version => return Err(format!("version {version}; 2 and 3 are read")),
    }
    let (tensor_count, value_count) = (source.u64()?, source.u64()?);
    if tensor_count.max(value_count) > MAX_COUNT {
        return Err(format!("{tensor_count} tensors and {value_count} keys, more than {MAX_COUNT}"));
    }
    let mut values = BTreeMap::new();
    for _ in 0..value_count {
        let key = source.text()?;
        let value = source.value()?;
        if values.insert(key.clone(), value).is_some() {
            return Err(format!("the key '{key}' stands twice"));
        }
    }
    let alignment = match values.get("general.alignment").map(Value::number) {
        None => ALIGNMENT,
        Some(Some(n)) if n.is_power_of_two() && n <= 1 << 20 => n,
        Some(_) => return Err("'general.alignment' is not a power of two".to_string()),
    };
    let (mut tensors, mut names) = (Vec::new(), std::collections::BTreeSet::new());
    for _ in 0..tensor_count {
        let tensor = source.tensor()?;
        if !names.insert(tensor.name.clone()) {
            return Err(format!("tensor '{}' stands twice", tensor.name));
        }
        tensors.push(tensor);
    }
    place(&mut tensors, source.at.next_multiple_of(alignment), alignment, len)?;
    Ok((values, tensors))
}

/// Counts the starts of tensors from the start of the file, and checks that they lie in it one
/// after another.
fn place(tensors: &mut [GgufTensor], data: u64, alignment: u64, len: u64) -> Checked<()> {
    tensors.sort_by_key(|t| (t.start, t.len));
    let mut end = data;
    for i in 0..tensors.len() {
        let next = tensors.get(i + 1).map(|t| data.saturating_add(t.start)).unwrap_or(len);
        let tensor = &mut tensors[i];
        let wrong = |reason: String| Err(format!("tensor '{}' {reason}", tensor.name));
        if !tensor.start.is_multiple_of(alignment) {
            return wrong(format!("starts at {}, not a multiple of {alignment}", tensor.start));
        }
        let Some(start) = data.checked_add(tensor.start) else { return wrong("starts beyond the file".to_string()) };
        if start < end {
            return wrong(format!("starts at byte {start}, inside the tensor that ends at {end}"));
        }
        if !tensor.kind.is_known() {
            tensor.len = next.min(len).saturating_sub(start);
        }
        match start.checked_add(tensor.len) {
            Some(e) if e <= len => end = e,
            _ => return wrong("ends after the end of the file; it is truncated".to_string()),
        }
        tensor.start = start;
    }
    Ok(())
}
