//! minijinja's `Object` trait for the containers: members, iteration, and calls of methods.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{State, Value};

use super::object::{Dict, Generator, Method, Namespace, Seq};
use super::{Args, Result, methods};

impl Object for Seq {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn call_method(self: &Arc<Self>, state: &mut State, name: &str, args: &[Value]) -> Result<Value> {
        methods::call(state, &Value::from_dyn_object(self.clone()), name, Args::new(args.to_vec()))
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn call_method(self: &Arc<Self>, state: &mut State, name: &str, args: &[Value]) -> Result<Value> {
        let receiver = Value::from_dyn_object(self.clone());
        methods::call(state, &receiver, name, Args::new(args.to_vec()))
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.drain())
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_str()?)
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State, args: &[Value]) -> Result<Value> {
        methods::call(state, &self.receiver, &self.name, Args::new(args.to_vec()))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {} of {} object>", self.name, super::type_name(&self.receiver))
    }
}
