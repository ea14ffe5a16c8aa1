-- Run once, on an empty volume. For development: the password is public. createdb is for the tests, which make
-- databases of their own; billing_demo is for those who try things out.
create role billing login createdb password 'billing';
create database billing owner billing;
create database billing_demo owner billing;
