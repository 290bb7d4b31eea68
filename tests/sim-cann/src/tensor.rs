//! `aclTensor` and its relatives, as libnnopbase.so makes them and the operators read them.

use crate::ffi::Address;

pub const MAX_DIMS: usize = 8;

/// Where the elements of a tensor are: address of the first, element type, sizes and strides (in elements).
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    pub data: Address,
    pub element: Element,
    pub rank: usize,
    pub dims: [usize; MAX_DIMS],
    pub strides: [isize; MAX_DIMS],
}

impl Tensor {
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.rank]
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether elements follow one another in order, without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims().iter().zip(self.strides()).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected *= dim as isize;
            fits
        })
    }

    /// The same tensor seen with `dims` (right-aligned), sizes of 1 repeated; `None` when they do not fit.
    pub fn broadcast(&self, dims: &[usize]) -> Option<Self> {
        let lead = dims.len().checked_sub(self.rank).filter(|_| dims.len() <= MAX_DIMS)?;
        let mut seen = Self { rank: dims.len(), dims: [1; MAX_DIMS], strides: [0; MAX_DIMS], ..*self };
        for (axis, &dim) in dims.iter().enumerate() {
            seen.dims[axis] = dim;
            let Some(own) = axis.checked_sub(lead) else { continue };
            if self.dims[own] == dim {
                seen.strides[axis] = self.strides[own];
            } else if self.dims[own] != 1 {
                return None;
            }
        }
        Some(seen)
    }
}

/// `aclDataType`, the types that occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    I8,
    I32,
    U8,
    I16,
    I64,
    F64,
    Bool,
    Bf16,
    /// Any other: operators leave such tensors alone.
    Other,
}

impl Element {
    pub fn of(code: i32) -> Self {
        match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::I8,
            3 => Self::I32,
            4 => Self::U8,
            6 => Self::I16,
            9 => Self::I64,
            11 => Self::F64,
            12 => Self::Bool,
            27 => Self::Bf16,
            _ => Self::Other,
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::I64 | Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool | Self::Other => 1,
        }
    }

    /// Reads the element at `address`.
    ///
    /// # Safety
    /// `address` holds a readable element of this type.
    pub unsafe fn load(self, address: Address) -> f64 {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::F32 => f64::from((address as *const f32).read_unaligned()),
                Self::F64 => (address as *const f64).read_unaligned(),
                Self::F16 => (address as *const half::f16).read_unaligned().to_f64(),
                Self::Bf16 => (address as *const half::bf16).read_unaligned().to_f64(),
                Self::I32 => f64::from((address as *const i32).read_unaligned()),
                Self::I64 => (address as *const i64).read_unaligned() as f64,
                Self::I16 => f64::from((address as *const i16).read_unaligned()),
                Self::I8 => f64::from((address as *const i8).read()),
                Self::U8 | Self::Bool => f64::from((address as *const u8).read()),
                Self::Other => 0.0,
            }
        }
    }

    /// Writes `value`, converted to this type, at `address`.
    ///
    /// # Safety
    /// `address` has room for a writable element of this type.
    pub unsafe fn store(self, address: Address, value: f64) {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::F32 => (address as *mut f32).write_unaligned(value as f32),
                Self::F64 => (address as *mut f64).write_unaligned(value),
                Self::F16 => (address as *mut half::f16).write_unaligned(half::f16::from_f64(value)),
                Self::Bf16 => (address as *mut half::bf16).write_unaligned(half::bf16::from_f64(value)),
                Self::I32 => (address as *mut i32).write_unaligned(value as i32),
                Self::I64 => (address as *mut i64).write_unaligned(value as i64),
                Self::I16 => (address as *mut i16).write_unaligned(value as i16),
                Self::I8 => (address as *mut i8).write(value as i8),
                Self::U8 => (address as *mut u8).write(value as u8),
                Self::Bool => (address as *mut u8).write(u8::from(value != 0.0)),
                Self::Other => {}
            }
        }
    }
}

/// `aclScalar`.
#[derive(Debug, Clone, Copy)]
pub struct Scalar(pub f64);

/// `aclIntArray`.
#[derive(Debug)]
pub struct IntArray(pub Vec<i64>);

/// `aclTensorList`: owns its tensors, of which some may be missing.
#[derive(Debug)]
pub struct TensorList(pub Vec<Option<Box<Tensor>>>);

/// `aclScalarList`: owns its scalars.
#[derive(Debug)]
pub struct ScalarList(pub Vec<Option<Box<Scalar>>>);
